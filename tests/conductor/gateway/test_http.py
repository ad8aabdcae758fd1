"""Over a real port: streaming as it happens, and clients that leave."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from conductor.gateway.gateway import Gateway
from conductor.gateway.server import base_url, bind
from protocol.config import GatewayConfig
from protocol.errors import ConfigError
from protocol.messages import Reason
from tests.support.fake_daemon import FakeDaemon

PATH = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "ref", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def url(app: Starlette) -> AsyncIterator[str]:
    listening = bind(GatewayConfig(port=0))
    server = uvicorn.Server(
        uvicorn.Config(app, lifespan="off", log_config=None, http="httptools", ws="none")
    )
    task = asyncio.ensure_future(server._serve([listening]))  # pyright: ignore[reportPrivateUsage]
    yield base_url(listening)
    server.should_exit = server.force_exit = True
    await task


@pytest.fixture
async def web(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=20) as client:
        yield client


async def test_tokens_arrive_as_they_are_made(web: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    answer = web.stream("POST", PATH, json={**HI, "stream": True})
    opening = asyncio.ensure_future(answer.__aenter__())
    await daemon.until(lambda: daemon.submits)
    daemon.emit(1, list(b"a"))
    lines = (await opening).aiter_lines()

    async def next_text() -> str:
        async for line in lines:
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                if choice["delta"].get("content"):
                    return choice["delta"]["content"]
        raise AssertionError("the stream ended")

    assert await next_text() == "a"
    for letter in "bcd":  # each is read before the next is made
        daemon.emit(1, list(letter.encode()))
        assert await next_text() == letter
    daemon.finish(1)
    assert [line async for line in lines if line][-1] == "data: [DONE]"
    await answer.__aexit__(None, None, None)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tokens", [0, 3])
async def test_a_client_that_leaves_frees_its_row(
    url: str, gateway: Gateway, daemon: FakeDaemon, *, stream: bool, tokens: int
) -> None:
    body = json.dumps({**HI, "stream": stream}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(
        b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s"
        % (PATH.encode(), len(body), body)
    )
    await daemon.until(lambda: daemon.submits)
    if tokens:
        daemon.emit(1, [97] * tokens)
        await daemon.until(lambda: not daemon.worker.unacknowledged(daemon.owner_of[1]))
        if stream:
            await reader.readuntil(b'"aaa"')
    writer.close()
    await daemon.until(lambda: daemon.closed)  # nothing else moves the stream
    assert daemon.closed == [(1, 1, Reason.CANCELLED, tokens)]
    assert await gateway.drain(10)
    began = stream and tokens
    assert gateway.counts == {"status_200" if began else "status_499": 1}


async def test_a_client_that_leaves_before_its_body_is_whole(
    url: str, gateway: Gateway, daemon: FakeDaemon
) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(b"POST %s HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{" % PATH.encode())
    await writer.drain()
    async with asyncio.timeout(10):
        while not gateway.statistics()["open"]:  # noqa: ASYNC110 (the server says nothing)
            await asyncio.sleep(0.01)
    writer.close()
    assert await gateway.drain(10)
    assert gateway.counts["status_499"] == 1
    assert daemon.submits == []


async def test_one_connection_serves_many_requests(
    web: httpx.AsyncClient, daemon: FakeDaemon
) -> None:
    daemon.auto = lambda s: [*b"ok"]
    for stream in (False, True) * 5:
        r = await web.post(PATH, json={**HI, "stream": stream})
        assert r.status_code == 200
        assert "ok" in r.text
    assert all(reason is Reason.LENGTH for _, _, reason, _ in daemon.closed)


async def test_many_at_once(web: httpx.AsyncClient, daemon: FakeDaemon) -> None:
    daemon.auto = lambda s: list(s.inputs["tokens"][::4])  # the prompt again

    async def ask(i: int) -> None:
        messages = [{"role": "user", "content": f"number {i}"}]
        r = await web.post(PATH, json={"model": "ref", "messages": messages})
        assert r.json()["choices"][0]["message"]["content"] == f"number {i}"

    await asyncio.gather(*(ask(i) for i in range(50)))


def test_an_address_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match=r"gateway\.host 'no such host'"):
        bind(GatewayConfig(host="no such host"))


@pytest.mark.parametrize(
    ("host", "begin"), [("0.0.0.0", "http://127.0.0.1:"), ("127.0.0.1", "http://127.0.0.1:")]
)
def test_the_url_is_one_that_can_be_asked(host: str, begin: str) -> None:
    with bind(GatewayConfig(host=host, port=0)) as s:
        assert base_url(s) == f"{begin}{s.getsockname()[1]}"
