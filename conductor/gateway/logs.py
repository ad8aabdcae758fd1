"""The gateway's log: structured lines to stderr, which the conductor reads."""

import logging
import os
import stat

import structlog

from protocol.config import LogConfig


class _Lines:
    """Writes whole lines and never waits: a conductor that stopped reading its pipe must not stop
    the probes. What does not fit is dropped and counted."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self.dropped = 0
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            os.set_blocking(fd, False)
        self.debug = self.info = self.warning = self.error = self.critical = self.msg

    def msg(self, message: str) -> None:
        try:
            os.write(self._fd, message.encode(errors="replace") + b"\n")
        except OSError:
            self.dropped += 1


class _Forward(logging.Handler):
    """uvicorn's own words, which come through the standard library."""

    def __init__(self, log: structlog.typing.FilteringBoundLogger) -> None:
        super().__init__(logging.WARNING)
        self._log = log

    def emit(self, record: logging.LogRecord) -> None:
        extra = {"exc_info": record.exc_info} if record.exc_info else {}
        self._log.warning(record.getMessage(), logger=record.name, **extra)


def make_log(config: LogConfig, fd: int = 2) -> structlog.typing.FilteringBoundLogger:
    """Text without a time of its own (the conductor's log adds it), or one JSON object a line."""
    processors: list[structlog.typing.Processor] = [structlog.processors.add_log_level]
    if config.format == "json":
        processors += [
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.dict_tracebacks,
            structlog.processors.JSONRenderer(default=repr),
        ]
    else:
        processors += [
            structlog.dev.ConsoleRenderer(
                colors=False, pad_event_to=0, exception_formatter=structlog.dev.plain_traceback
            )
        ]
    log: structlog.typing.FilteringBoundLogger = structlog.wrap_logger(
        _Lines(fd),
        processors=processors,
        wrapper_class=structlog.make_filtering_bound_logger(config.level),
    )
    return log


def forward_standard_logging(log: structlog.typing.FilteringBoundLogger) -> None:
    """Warnings and errors of uvicorn and asyncio become lines of `log`."""
    handler = _Forward(log)
    for name in ("uvicorn", "uvicorn.error", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
