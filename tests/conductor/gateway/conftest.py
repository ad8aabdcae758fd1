from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest
import structlog
from starlette.applications import Starlette

from conductor.gateway.app import make_app
from conductor.gateway.gateway import Gateway
from conductor.gateway.health import Health
from protocol.channel.endpoints import Endpoints
from protocol.channel.memory import MemoryNetwork
from protocol.client.async_client import AsyncClient
from protocol.client.stats import StatsReader
from protocol.config import DaemonConfig, parse
from tests.support.fake_daemon import FakeDaemon, ShiftedClock


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    net = MemoryNetwork()
    yield net
    net.close()


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    return Endpoints(tmp_path)


@pytest.fixture
async def daemon(network: MemoryNetwork, endpoints: Endpoints) -> AsyncIterator[FakeDaemon]:
    d = FakeDaemon(network, endpoints).start()
    yield d
    d.close()


@pytest.fixture
def config() -> DaemonConfig:
    return parse(
        {
            "models": {"ref": {"kind": "reference"}},
            "gateway": {"max_body_bytes": 100_000},
            "limits": {"default_deadline_ms": 60_000},
        }
    )


@pytest.fixture
def logged() -> structlog.testing.CapturingLoggerFactory:
    return structlog.testing.CapturingLoggerFactory()


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
async def starting(
    config: DaemonConfig, logged: structlog.testing.CapturingLoggerFactory, clock: ShiftedClock
) -> AsyncIterator[Gateway]:
    """A gateway that is not connected yet."""
    log = structlog.wrap_logger(
        logged(), processors=[structlog.processors.add_log_level, lambda _, __, e: ((), e)]
    )
    gateway = Gateway(config, log, clock)
    await gateway.load()
    yield gateway
    gateway.close()


@pytest.fixture
async def gateway(
    starting: Gateway, daemon: FakeDaemon, network: MemoryNetwork, endpoints: Endpoints
) -> Gateway:
    client = AsyncClient(endpoints, network, role="gateway")
    await client.connect(10)
    starting.client = client
    return starting


@pytest.fixture
def health(network: MemoryNetwork, endpoints: Endpoints, clock: ShiftedClock) -> Health:
    return Health(StatsReader(endpoints, network), clock)


@pytest.fixture
def app(gateway: Gateway, health: Health) -> Starlette:
    return make_app(gateway, health)


@pytest.fixture
async def http(app: Starlette) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
        yield client
