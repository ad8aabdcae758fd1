"""Raw bytes at the gateway's port (P19): broken HTTP, broken JSON, nonsense in known fields.

Whatever arrives: the server goes on, answers are HTTP and never 500 or more, and the next decent
request is served.
"""

import asyncio
import contextlib
import json
import shutil
import socket
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog
import uvicorn
from hypothesis import given
from hypothesis import strategies as st

from conductor.gateway import chat, openai_schema, request_body
from conductor.gateway.app import make_app
from conductor.gateway.gateway import Gateway
from conductor.gateway.health import Health
from conductor.gateway.server import bind
from protocol.channel.endpoints import Endpoints
from protocol.channel.zeromq import ZmqNetwork
from protocol.client.async_client import AsyncClient
from protocol.client.stats import StatsReader
from protocol.config import GatewayConfig, parse
from tests.support.budget import budget, hunt
from tests.support.fake_daemon import FakeDaemon
from tests.support.fuzz import BOUND_S, LoopThread, mutated

PATH = "/v1/chat/completions"
HI: dict[str, Any] = {"model": "ref", "messages": [{"role": "user", "content": "hi"}]}
MAX_BODY = 5000
QUIET_S = 0.03  # an answer that comes later is judged by what was counted


class Server(uvicorn.Server):
    """Without signal handlers: it runs in a thread."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class Service:
    """The gateway's app on a real port, a fake daemon behind it, on a loop in a thread."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="podium-fuzz-"))
        self.thread = LoopThread()
        self.network = ZmqNetwork()
        self.logged = structlog.testing.CapturingLoggerFactory()
        self.thread.do(self._start())

    async def _start(self) -> None:
        endpoints = Endpoints(self.folder)
        self.daemon = FakeDaemon(self.network, endpoints).start()
        self.daemon.auto = lambda submit: list(b"ok")
        config = parse(
            {"models": {"ref": {"kind": "reference"}}, "gateway": {"max_body_bytes": MAX_BODY}}
        )
        log = structlog.wrap_logger(
            self.logged(), processors=[structlog.processors.add_log_level, lambda _, __, e: ((), e)]
        )
        self.gateway = Gateway(config, log)
        await self.gateway.load()
        self.gateway.client = AsyncClient(endpoints, self.network, role="gateway")
        await self.gateway.client.connect()
        health = Health(StatsReader(endpoints, self.network), self.gateway.clock)
        self.polling = asyncio.ensure_future(health.run())
        listening = bind(GatewayConfig(port=0))
        self.port = listening.getsockname()[1]
        app = make_app(self.gateway, health)
        config = uvicorn.Config(app, lifespan="off", log_config=None, http="httptools", ws="none")
        self.server = Server(config)
        self.serving = asyncio.ensure_future(self.server.serve([listening]))

    def say(self, data: bytes, patience_s: float = BOUND_S) -> bytes:
        """What is answered until the server hangs up, or says nothing for so long."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=BOUND_S) as s:
            answer = bytearray()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError, TimeoutError):
                s.sendall(data)
                s.settimeout(patience_s)
                while got := s.recv(65536):
                    answer += got
            return bytes(answer)

    def check(self, answer: bytes) -> None:
        self.thread.check()
        if answer:
            assert answer.startswith(b"HTTP/1.1 "), answer[:80]
            assert int(answer[9:12]) < 500, answer[:400]
        failed = [k for k in self.gateway.counts if k.startswith("status_5")]
        assert not failed, failed
        bugs = [c for c in self.logged.logger.calls if c.method_name in ("exception", "error")]
        assert not bugs, bugs

    def serves(self) -> None:
        answer = self.say(request(json.dumps(HI).encode(), b"Connection: close\r\n"))
        assert answer.startswith(b"HTTP/1.1 200 "), answer
        assert b'"content":"ok"' in answer
        self.check(answer)

    async def _stop(self) -> None:
        self.server.should_exit = self.server.force_exit = True
        await self.serving
        self.polling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.polling
        self.gateway.close()
        self.daemon.close()

    def close(self) -> None:
        self.thread.do(self._stop())
        self.network.close()
        self.thread.close()
        shutil.rmtree(self.folder)


def request(body: bytes, more: bytes = b"") -> bytes:
    head = b"POST %s HTTP/1.1\r\nHost: x\r\n%sContent-Length: %d\r\n\r\n"
    return head % (PATH.encode(), more, len(body)) + body


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda x: st.lists(x, max_size=3) | st.dictionaries(st.text(max_size=9), x, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from([*openai_schema.ChatRequest.model_fields, "n", "tools", "\ud800", "x"])
MESSAGE = st.dictionaries(st.sampled_from(["role", "content", "name"]), JSON | st.just("user"))
NEAR = st.dictionaries(FIELDS, JSON | st.lists(MESSAGE, max_size=2), max_size=4)
BODIES = st.one_of(
    st.binary(max_size=60),
    JSON.map(lambda v: json.dumps(v).encode()),
    NEAR.map(lambda more: json.dumps({**HI, **more}).encode()),
    mutated(st.just(json.dumps({**HI, "max_tokens": 5, "stop": ["a"]}).encode())),
    st.integers(1000, 3000).map(lambda n: b"[" * n),
    st.just(b" " * (MAX_BODY + 1)),
)
HEADERS = st.sampled_from(
    [
        b"", b"Transfer-Encoding: chunked\r\n", b"Content-Length: -1\r\n", b"X: " + b"y" * 9000,
        b"Content-Length: 99999999999999999999\r\n", b"Expect: 100-continue\r\n",
        b"X-Request-Id: \xff\r\n", b"Content-Type: text/plain; charset=utf-7\r\n",
    ]
)  # fmt: skip
WHOLE = st.builds(request, BODIES, HEADERS)
OTHERS = st.sampled_from(
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /v1/models/%2e%2e%00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00",  # TLS
    ]
)
SAID = st.one_of(
    st.binary(max_size=60), WHOLE, WHOLE, mutated(WHOLE), mutated(OTHERS),
    st.lists(WHOLE, min_size=2, max_size=3).map(b"".join),
)  # fmt: skip


@pytest.fixture
def service() -> Iterator[Service]:
    s = Service()
    yield s
    s.close()


def fuzz(service: Service, settings: Any) -> None:
    @settings
    @given(SAID)
    def harmless(data: bytes) -> None:
        service.check(service.say(data, QUIET_S))
        service.serves()

    harmless()


def test_any_bytes_at_the_gateways_port(service: Service) -> None:
    service.serves()
    fuzz(service, budget(120))
    statuses = {k for k in service.gateway.counts if k.startswith("status_")}
    assert {"status_200", "status_400", "status_413"} <= statuses, "what was refused is counted"


def careless_json(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nesting that overflows the stack is nobody's concern."""

    async def read_json(request: Any, limit: int) -> Any:
        return json.loads(await request.body())

    monkeypatch.setattr(chat, "read_json", read_json)
    monkeypatch.setattr(request_body, "read_json", read_json)


def trusting_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever JSON it is, it is taken for an object."""
    monkeypatch.setattr(chat, "parse", lambda body: openai_schema.parse(dict(body)))


@pytest.mark.parametrize("plant", [careless_json, trusting_schema])
def test_it_finds_a_planted_bug(
    service: Service, plant: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plant(monkeypatch)
    service.serves()
    with pytest.raises(AssertionError):
        fuzz(service, hunt(200))
