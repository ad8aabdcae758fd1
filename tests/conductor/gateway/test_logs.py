import json
import logging
import os
from collections.abc import Iterator

import pytest

from conductor.gateway.logs import forward_standard_logging, make_log
from protocol.config import LogConfig


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    read, write = os.pipe()
    yield read, write
    os.close(read)
    os.close(write)


def test_text_is_one_line_an_event(pipe: tuple[int, int]) -> None:
    make_log(LogConfig(), pipe[1]).info("serving", url="http://x")
    assert os.read(pipe[0], 1000).decode() == "[info     ] serving url=http://x\n"


def test_json(pipe: tuple[int, int]) -> None:
    make_log(LogConfig(format="json"), pipe[1]).info("serving", port=1)
    line = json.loads(os.read(pipe[0], 1000))
    assert (line["event"], line["level"], line["port"]) == ("serving", "info", 1)
    assert "timestamp" in line


def test_the_level_is_kept(pipe: tuple[int, int]) -> None:
    log = make_log(LogConfig(level="warning"), pipe[1])
    log.info("quiet")
    log.warning("loud")
    assert b"quiet" not in (data := os.read(pipe[0], 1000))
    assert b"loud" in data


def test_a_reader_that_does_not_read_stops_nobody(pipe: tuple[int, int]) -> None:
    log = make_log(LogConfig(), pipe[1])
    for _ in range(2000):  # the pipe holds 64 KiB
        log.info("x" * 1000)
    assert len(os.read(pipe[0], 1 << 20)) <= 1 << 16


def test_what_libraries_log_is_a_line_too(pipe: tuple[int, int]) -> None:
    names = ("uvicorn", "uvicorn.error", "asyncio")
    before = [(n, logging.getLogger(n).handlers, logging.getLogger(n).propagate) for n in names]
    try:
        forward_standard_logging(make_log(LogConfig(), pipe[1]))
        logging.getLogger("uvicorn.error").error("bad %s", "thing")
        assert os.read(pipe[0], 1000) == b"[warning  ] bad thing [uvicorn.error]\n"
    finally:
        for name, handlers, propagate in before:
            logging.getLogger(name).handlers = handlers
            logging.getLogger(name).propagate = propagate
