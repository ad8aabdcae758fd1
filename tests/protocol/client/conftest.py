from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from protocol.channel.base import Network
from protocol.channel.endpoints import Endpoints
from protocol.channel.memory import MemoryNetwork
from protocol.channel.zeromq import ZmqNetwork
from protocol.client.async_client import AsyncClient
from tests.support.fake_daemon import FakeDaemon, ShiftedClock


@pytest.fixture(params=["memory", "zeromq"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    net: Network = MemoryNetwork() if request.param == "memory" else ZmqNetwork()
    yield net
    net.close()


@pytest.fixture
def endpoints(tmp_path: Path) -> Endpoints:
    return Endpoints(tmp_path)


@pytest.fixture
async def daemon(network: Network, endpoints: Endpoints) -> AsyncIterator[FakeDaemon]:
    d = FakeDaemon(network, endpoints).start()
    yield d
    d.close()


@pytest.fixture
def clock() -> ShiftedClock:
    return ShiftedClock()


@pytest.fixture
async def client(
    daemon: FakeDaemon, network: Network, endpoints: Endpoints, clock: ShiftedClock
) -> AsyncIterator[AsyncClient]:
    c = AsyncClient(endpoints, network, clock=clock)
    await c.connect(10)
    yield c
    c.close()
