"""The stats socket answers `snapshot` and nothing else; snapshots survive their bytes."""

from collections.abc import Iterator
from pathlib import Path

import msgpack
import pytest

from conductor.observe.histogram import Histogram
from conductor.observe.render import render
from conductor.observe.stats_socket import StatsSocket, read_snapshot
from protocol import stats
from protocol.channel.endpoints import Endpoints
from protocol.channel.memory import MemoryNetwork
from protocol.channel.zeromq import ZmqNetwork
from protocol.errors import BadMessage, Unavailable
from tests.support.snapshots import snapshot


@pytest.fixture
def network() -> Iterator[MemoryNetwork]:
    network = MemoryNetwork()
    yield network
    network.close()


def test_it_answers_snapshot_and_ignores_the_rest(network: MemoryNetwork) -> None:
    taken = 0

    def take() -> stats.Snapshot:
        nonlocal taken
        taken += 1
        return snapshot()

    server = StatsSocket(network.bind("stats"), take)
    a, b = network.connect("stats"), network.connect("stats")
    a.send(b"Snapshot")
    a.send(b"")
    a.send(stats.SNAPSHOT)
    b.send(stats.SNAPSHOT)
    assert server.receive() is False
    answers = [frame for channel in (a, b) for _, frame in channel.receive()]
    assert [stats.decode(x) for x in answers] == [snapshot(), snapshot()]
    assert (server.served, server.ignored, taken) == (2, 2, 1)


def test_no_daemon_is_told_by_its_directory(tmp_path: Path) -> None:
    network = ZmqNetwork()
    with pytest.raises(Unavailable, match=f"no daemon answers in {tmp_path}"):
        read_snapshot(network, Endpoints(tmp_path), timeout_s=0.05)
    network.close()


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (b"", "not a snapshot"),
        (b"\xc1", "not a snapshot"),
        (msgpack.packb([1, 2]), "a map is expected, got list"),
        (msgpack.packb({"schema": 99}), "snapshot schema 99; this side reads 1"),
        (msgpack.packb({"schema": 1, "conductor": {}}), "'machine' is missing"),
        (msgpack.packb({**snapshot(), "children": {}}), "'children' is missing or no list"),
    ],
)
def test_other_bytes_are_no_snapshot(frame: bytes, why: str) -> None:
    with pytest.raises(BadMessage, match=why):
        stats.decode(frame)


def test_the_page_for_people_shows_who_runs_and_what_is_wrong() -> None:
    page = render(snapshot())
    for part in (
        "podium  ready  pid 41  up 1 h 1 min",
        "http://127.0.0.1:8000  models: reference",
        "5 submitted, 1 open (1 rows, 0 queued with 0 tokens)",
        "closed    3 stop, 1 cancelled",
        "w0       worker   42   ready    2         ended by SIGKILL",
        "w0      ready  cpu     1     1        3/100  17     12 ms  wasted=2\n",
        "dropped: 2 malformed",
        "counters  1 replayed",
        "bugs      1: see the log",
    ):
        assert part in page, page


def test_a_histogram_counts_each_once() -> None:
    h = Histogram((1.0, 10.0))
    for ms in (0.5, 1.0, 2.0, 50.0):
        h.add(ms)
    assert h.statistics() == {
        "bounds_ms": [1.0, 10.0], "counts": [2, 1, 1], "total_ms": 53.5, "max_ms": 50.0,
    }  # fmt: skip
