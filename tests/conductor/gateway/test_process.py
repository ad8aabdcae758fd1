"""`python -m conductor.gateway` as the conductor starts it, against a fake daemon."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.messages import Reason, Refuse
from tests.support.fake_daemon import FakeDaemon

pytestmark = pytest.mark.processes

PATH = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "ref", "messages": [{"role": "user", "content": "hi"}]}
LIFE = 4711


class Process:
    def __init__(self, endpoints: Endpoints) -> None:
        self.endpoints = endpoints
        self.read, self._write = os.pipe()
        self._alive = True

    async def start(self, **config: Any) -> None:
        data = {"models": {"ref": {"kind": "reference"}}, "gateway": {"port": 0}, **config}
        self.endpoints.config.write_text(json.dumps(data))
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "conductor.gateway", "--config", str(self.endpoints.config),
            "--life", str(LIFE), "--control-root", str(self.endpoints.root),
            "--death-fd", str(self.read), pass_fds=(self.read,), stderr=asyncio.subprocess.PIPE,
            cwd=Path(__file__).parents[3],
        )  # fmt: skip

    def conductor_dies(self) -> None:
        if self._alive:
            self._alive = False
            os.close(self._write)

    async def url(self) -> str:
        """Once it serves."""
        while b"serving at" not in (line := await self.line()):
            assert line, "it ended"
        return self.endpoints.gateway.read_text()

    async def line(self) -> bytes:
        assert self.process.stderr
        return await asyncio.wait_for(self.process.stderr.readline(), 30)

    async def end(self) -> tuple[int, str]:
        _, err = await asyncio.wait_for(self.process.communicate(), 30)
        return self.process.returncode or 0, err.decode()


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[FakeDaemon]:
    net = ZmqNetwork()
    d = FakeDaemon(net, Endpoints(tmp_path)).start()
    yield d
    d.close()
    net.close()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    p = Process(Endpoints(tmp_path))
    yield p
    if p.process.returncode is None:
        p.process.kill()
        await p.process.wait()
    p.conductor_dies()
    os.close(p.read)


async def test_it_serves_and_drains(daemon: FakeDaemon, process: Process) -> None:
    await process.start()
    async with httpx.AsyncClient(base_url=await process.url(), timeout=20) as http:
        assert (daemon.hellos[0].role, daemon.hellos[0].life) == ("gateway", LIFE)
        daemon.auto = lambda s: [*b"hello"]
        r = await http.post(PATH, json=HI)
        assert r.json()["choices"][0]["message"]["content"] == "hello"
        async with asyncio.timeout(10):
            while (await http.get("/readyz")).status_code != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        daemon.auto = None
        asking = asyncio.ensure_future(http.post(PATH, json=HI))
        await daemon.until(lambda: len(daemon.submits) == 2)
        process.process.send_signal(signal.SIGTERM)
        while b"draining" not in await process.line():
            pass
        assert (await http.post(PATH, json=HI)).status_code == 503
        assert (await http.get("/livez")).status_code == 200
        daemon.finish(2, tokens=list(b"bye"))
        assert (await asking).json()["choices"][0]["message"]["content"] == "bye"
    code, err = await process.end()
    assert (code, "Traceback" in err) == (0, False)
    assert not process.endpoints.gateway.exists()
    await daemon.until(lambda: daemon.byes)


async def test_a_second_signal_aborts(daemon: FakeDaemon, process: Process) -> None:
    await process.start()
    async with httpx.AsyncClient(base_url=await process.url(), timeout=20) as http:
        asking = asyncio.ensure_future(http.post(PATH, json=HI))
        await daemon.until(lambda: daemon.submits)
        process.process.send_signal(signal.SIGTERM)
        while b"draining" not in await process.line():
            pass
        process.process.send_signal(signal.SIGTERM)
        assert (await asking).status_code == 503
    assert (await process.end())[0] == 1
    await daemon.until(lambda: daemon.closed)
    assert daemon.closed == [(1, 1, Reason.ABORTED, 0)]


async def test_it_dies_with_the_conductor(daemon: FakeDaemon, process: Process) -> None:
    await process.start()
    await process.url()
    process.conductor_dies()
    code, err = await process.end()
    assert code == 1
    assert "the conductor is gone" in err
    assert not process.endpoints.gateway.exists()


async def test_being_fenced_ends_it(daemon: FakeDaemon, process: Process) -> None:
    await process.start()
    await process.url()
    daemon.send(LIFE, Refuse("fenced", "it was silent"))
    code, err = await process.end()
    assert code == 1
    assert "it was silent" in err


async def test_a_signal_while_it_starts(tmp_path: Path, process: Process) -> None:
    await process.start()  # there is no conductor
    while b"tokenizer loaded" not in await process.line():
        pass
    process.process.send_signal(signal.SIGTERM)
    assert (await process.end())[0] == 0


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ({"models": {"m": {"source": "/no/such/file.gguf"}}}, "does not exist"),
        ({"gateway": {"port": 0, "host": "no such host"}}, "gateway.host"),
        ({"gatewai": {}}, "did you mean 'gateway'"),
    ],
)
async def test_a_configuration_that_cannot_be_used_is_78(
    daemon: FakeDaemon, process: Process, config: dict[str, Any], text: str
) -> None:
    await process.start(**config)
    code, err = await process.end()
    assert code == 78
    assert text in err
    assert "Traceback" not in err


async def test_a_port_that_is_taken_is_named(daemon: FakeDaemon, process: Process) -> None:
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    await process.start(gateway={"port": port})
    code, err = await process.end()
    assert code == 1
    assert "cannot listen" in err
    server.close()
