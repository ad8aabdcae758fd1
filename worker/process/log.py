"""The log thread: what a worker says on stderr, log lines and progress that the supervisor draws.

Owns: stderr, once the worker serves.
Waits on: its queue of lines; on stderr, until it takes them.
Signals: nobody.
Never: holds up a thread that schedules, though the supervisor may not read its pipe (P12).
"""

import json
import logging
import logging.handlers
import os
import sys
from queue import SimpleQueue
from typing import Any

PROGRESS = "podium-progress "

_FORMAT = "[%(levelname)s] %(message)s"  # the conductor adds time and name


class Log:
    """Root logging for the process. `detach` moves the writing to its own thread."""

    def __init__(self, name: str, level: str) -> None:
        self.name = name
        self._stream = logging.StreamHandler(sys.stderr)
        self._stream.setFormatter(logging.Formatter(_FORMAT))
        self._listener: logging.handlers.QueueListener | None = None
        root = logging.getLogger()
        root.handlers[:] = [self._stream]
        root.setLevel(level.upper())
        self._logger = logging.getLogger(f"worker.{name}")

    def detach(self) -> None:
        lines: SimpleQueue[Any] = SimpleQueue()
        self._listener = logging.handlers.QueueListener(lines, self._stream)
        self._listener.start()
        logging.getLogger().handlers[:] = [logging.handlers.QueueHandler(lines)]

    def say(self, level: str, text: str) -> None:
        self._logger.log(logging.getLevelNamesMapping()[level.upper()], text)

    def last_words(self, text: str) -> None:
        """Past every queue and lock: the process ends right after."""
        os.write(2, f"[ERROR] {text}\n".encode(errors="replace"))

    def close(self) -> None:
        """Writes what waits."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None


def progress(worker: str, phase: str, **figures: Any) -> None:
    """One line that the supervisor shows, not logs: `{"worker", "phase", "done", "total", …}`."""
    line = json.dumps({"worker": worker, "phase": phase, **figures})
    print(PROGRESS + line, file=sys.stderr, flush=True)
