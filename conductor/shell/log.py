"""The log thread: lines of the daemon and its children, to one stream, without ever blocking the
scheduler (P12).

Owns: the file descriptor of the log.
Waits on: a condition, for lines; then on the descriptor, until it takes them.
Signals: nobody.
Never: calls into the conductor.

A reader that stops reading (a full pipe, a stopped terminal) fills a bounded backlog; what does not
fit is dropped and counted, and the count is told when the reader comes back.
"""

import os
import select
import threading
from collections import deque
from contextlib import suppress

import structlog

from protocol.config import LogConfig

_BACKLOG = 4 << 20  # bytes
_CLOSE_S = 0.5


class LogWriter:
    """Lines to a file descriptor. `write` and `status` are for any thread and never wait.

    `status` is one line that is rewritten in place below the log; terminals only.
    """

    def __init__(self, fd: int, terminal: bool) -> None:
        self.terminal = terminal
        self._fd = fd
        self._lines: deque[bytes] = deque()
        self._bytes = 0
        self._dropped = 0
        self._status = self._shown = b""
        self._closing = False
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="log", daemon=True)
        self._thread.start()

    def write(self, line: str) -> None:
        data = line.encode(errors="replace") + b"\n"
        with self._wake:
            if self._bytes + len(data) > _BACKLOG:
                self._dropped += 1
                return
            self._lines.append(data)
            self._bytes += len(data)
            self._wake.notify()

    def status(self, text: str) -> None:
        if self.terminal:
            with self._wake:
                self._status = text.encode(errors="replace")
                self._wake.notify()

    def close(self) -> None:
        """Writes what waits, for at most half a second."""
        with self._wake:
            self._closing = True
            self._status = b""
            self._wake.notify()
        self._thread.join(_CLOSE_S)

    def statistics(self) -> dict[str, int]:
        with self._wake:
            return {"waiting_bytes": self._bytes, "dropped_lines": self._dropped}

    def _run(self) -> None:
        told = 0
        while True:
            with self._wake:
                while not (self._lines or self._closing or self._status != self._shown):
                    self._wake.wait()
                if not self._lines and self._closing and self._status == self._shown:
                    return
                data = b"".join(self._lines)
                self._lines.clear()
                status, dropped = self._status, self._dropped
            if dropped > told:
                data += b"(%d log lines were dropped: this stream was not read)\n" % (
                    dropped - told
                )
                told = dropped
            clear = b"\r\x1b[K" if self._shown else b""
            self._put(clear + data + status)
            with self._wake:
                self._shown = status
                self._bytes = sum(map(len, self._lines))

    def _put(self, data: bytes) -> None:
        with suppress(OSError):  # the stream is gone: there is nobody to tell
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:
                    select.select([], [self._fd], [], 1.0)


def _name_the_child(
    _logger: object, _method: str, fields: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """What a child says begins with the child's name."""
    child = fields.pop("child", None)
    if child is not None:
        fields["event"] = f"{child}: {fields['event']}"
    return fields


class _Logger:
    """What structlog calls with the rendered line, whatever the level."""

    def __init__(self, writer: LogWriter) -> None:
        self.msg = writer.write
        self.debug = self.info = self.warning = self.error = self.critical = self.msg


def make_logger(config: LogConfig, writer: LogWriter) -> structlog.typing.FilteringBoundLogger:
    """The daemon's logger: text for people (colours on a terminal only), or JSON line by line."""
    if config.format == "json":
        renderer: list[structlog.typing.Processor] = [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=repr),
        ]
    else:
        renderer = [
            structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
            _name_the_child,
            structlog.dev.ConsoleRenderer(
                colors=writer.terminal,
                pad_event_to=0,
                exception_formatter=structlog.dev.plain_traceback,
            ),
        ]
    return structlog.wrap_logger(
        _Logger(writer),
        processors=[structlog.processors.add_log_level, *renderer],
        wrapper_class=structlog.make_filtering_bound_logger(config.level),
        cache_logger_on_first_use=True,
    )
