"""Logging never waits; what does not fit is counted; what text, JSON and progress look like."""

import json
import os
import threading

import pytest

from conductor.shell.console import Console, describe
from conductor.shell.log import LogWriter
from protocol.config import LogConfig


class Pipe:
    def __init__(self, terminal: bool = False) -> None:
        self.read_fd, self.write_fd = os.pipe()
        self.writer = LogWriter(self.write_fd, terminal)

    def finish(self) -> str:
        """All that was written."""
        self.writer.close()
        os.close(self.write_fd)
        with os.fdopen(self.read_fd, "rb") as f:
            return f.read().decode()


def test_text_lines_name_the_child_that_speaks() -> None:
    pipe = Pipe()
    console = Console(LogConfig(), pipe.writer)
    console.log.debug("not shown")
    console.log.warning("w1 ended", why="exit status 1")
    console.child("w0", "[WARNING] hello")
    first, second = pipe.finish().splitlines()
    assert first.endswith("[warning  ] w1 ended why='exit status 1'")
    assert second.endswith("[warning  ] w0: hello")


def test_json_lines_hold_fields_and_tracebacks() -> None:
    pipe = Pipe()
    console = Console(LogConfig(format="json", level="debug"), pipe.writer)
    console.child("gw", '{"event": "hello", "level": "info", "status": 200, "timestamp": "t"}')
    try:
        raise ValueError("x")
    except ValueError as e:
        console.log.error("bug", exc_info=e, odd=object)
    first, second = map(json.loads, pipe.finish().splitlines())
    assert (first["event"], first["child"], first["level"]) == ("hello", "gw", "info")
    assert first["status"] == 200
    assert second["exception"][0]["exc_type"] == "ValueError"


def test_a_reader_that_stopped_costs_lines_but_never_time() -> None:
    pipe = Pipe()
    line = "x" * 1023
    done = threading.Event()

    def flood() -> None:
        for _ in range(8000):  # twice the backlog; nobody reads
            pipe.writer.write(line)
        done.set()

    threading.Thread(target=flood, daemon=True).start()
    assert done.wait(30), "write() waited for the reader"
    dropped = pipe.writer.statistics()["dropped_lines"]
    assert dropped > 3000
    text = bytearray()
    while b"were dropped" not in text:
        text += os.read(pipe.read_fd, 1 << 16)
        pipe.writer.write("more")  # wakes the thread once it is through
    assert b"log lines were dropped" in text
    pipe.finish()


def test_progress_is_one_rewritten_line_on_a_terminal() -> None:
    pipe = Pipe(terminal=True)
    console = Console(LogConfig(), pipe.writer)
    seen = b""
    console.progress("w0", {"phase": "loading", "done": 1, "total": 4})
    while b"25%" not in seen:
        seen += os.read(pipe.read_fd, 4096)
    console.progress("w0", {"phase": "loading", "done": 2, "total": 4})
    while b"50%" not in seen:
        seen += os.read(pipe.read_fd, 4096)
    assert b"\n" not in seen
    assert b"\r\x1b[K" in seen
    console.end_progress()
    assert pipe.finish().endswith("\r\x1b[K")


def test_progress_elsewhere_is_log_lines_but_few() -> None:
    pipe = Pipe()
    console = Console(LogConfig(), pipe.writer)
    for i in range(100):
        console.progress("w0", {"phase": "loading", "done": i, "total": 100})
    assert len(pipe.finish().splitlines()) == 1


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (
            {"worker": "w0", "phase": "load", "done": 3, "total": 12, "what": "tensors"},
            "load 25% (3/12 tensors)",
        ),
        ({"phase": "warm-up", "model": "m", "bucket": 8}, "warm-up m bucket=8"),
        ({"done": 1, "total": 0}, "done=1 total=0"),
        ({}, ""),
    ],
)  # fmt: skip
def test_describe(progress: dict[str, object], text: str) -> None:
    assert describe(progress) == text
