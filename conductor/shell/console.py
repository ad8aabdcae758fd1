"""What people see of a running daemon: its log, its children's lines, how far loading is."""

import time
from typing import Any

import structlog

from conductor.shell import child_line
from conductor.shell.log import LogWriter, make_logger
from protocol.config import LogConfig

_EVERY_S = 2.0  # progress lines of one child, where they can't be rewritten in place


class Console:
    """`log` takes structured lines. `progress` is one rewritten line on a terminal, else log lines
    at most every two seconds for each child."""

    def __init__(self, config: LogConfig, writer: LogWriter) -> None:
        self._writer = writer
        self.log: structlog.typing.FilteringBoundLogger = make_logger(config, writer)
        self._progress: dict[str, str] = {}
        self._told_at: dict[str, float] = {}

    def child(self, name: str, line: str) -> None:
        level, text, fields = child_line.read(line)
        getattr(self.log, level)(text, child=name, **fields)

    def progress(self, name: str, progress: dict[str, Any]) -> None:
        text = describe(progress)
        self._progress[name] = text
        if self._writer.terminal:
            self._redraw()
            return
        now = time.monotonic()
        if now - self._told_at.get(name, -_EVERY_S) >= _EVERY_S:
            self._told_at[name] = now
            self.log.info(text, child=name)

    def end_progress(self, name: str | None = None) -> None:
        """Of one child, or of all."""
        for each in [name] if name is not None else list(self._progress):
            self._progress.pop(each, None)
            self._told_at.pop(each, None)
        self._redraw()

    def statistics(self) -> dict[str, int]:
        return self._writer.statistics()

    def close(self) -> None:
        self._writer.close()

    def _redraw(self) -> None:
        self._writer.status("   ".join(f"{n}: {t}" for n, t in self._progress.items()))


def describe(progress: dict[str, Any]) -> str:
    """`{"phase": "load", "model": "m", "done": 3, "total": 12, "what": "tensors"}` -> `load m 25%
    (3/12 tensors)`. What is not there is not shown; unknown fields are shown by name."""
    rest = {k: v for k, v in progress.items() if k != "worker"}  # the line's name says which
    words = [str(rest.pop(k)) for k in ("phase", "model") if k in rest]
    done, total = rest.get("done"), rest.get("total")
    if isinstance(done, int | float) and isinstance(total, int | float) and total > 0:
        unit = f" {rest.pop('what')}" if "what" in rest else ""
        words.append(f"{min(100, round(100 * done / total))}% ({done}/{total}{unit})")
        del rest["done"], rest["total"]
    words += [f"{k}={v}" for k, v in rest.items()]
    return " ".join(words)
