"""One contract, two channels: ZeroMQ over a Unix socket, and its in-memory twin."""

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from protocol.channel.base import Channel, Network, Sent
from protocol.channel.memory import MemoryNetwork
from protocol.channel.zeromq import AddressInUse, ZmqNetwork


@pytest.fixture(params=["memory", "zeromq"])
def network(request: pytest.FixtureRequest) -> Iterator[Network]:
    net: Network = MemoryNetwork() if request.param == "memory" else ZmqNetwork()
    yield net
    net.close()


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"ipc://{tmp_path}/a.sock"


def drain(channel: Channel, n: int, seconds: float = 5.0) -> list[tuple[bytes, bytes]]:
    """Receive exactly `n` frames, or fail."""
    poller = zmq.Poller()
    poller.register(channel.pollable, zmq.POLLIN)
    got: list[tuple[bytes, bytes]] = []
    while len(got) < n:
        assert poller.poll(seconds * 1000), f"{len(got)} of {n} frames arrived"
        got += channel.receive()
    return got


def test_frames_go_both_ways_in_order(network: Network, address: str) -> None:
    server, client = network.bind(address), network.connect(address)
    for i in range(300):
        assert client.send(b"%d" % i) is Sent.OK
    got = drain(server, 300)
    assert [f for _, f in got] == [b"%d" % i for i in range(300)]
    peer = got[0][0]
    assert all(p == peer for p, _ in got)
    for i in range(300):
        assert server.send(b"r%d" % i, peer) is Sent.OK
    assert drain(client, 300) == [(b"", b"r%d" % i) for i in range(300)]
    assert client.receive() == []


def test_peers_are_told_apart(network: Network, address: str) -> None:
    server = network.bind(address)
    clients = [network.connect(address) for _ in range(3)]
    for i, c in enumerate(clients):
        c.send(b"%d" % i)
    peers = {frame: peer for peer, frame in drain(server, 3)}
    assert len(set(peers.values())) == 3
    server.send(b"for 1", peers[b"1"])
    assert drain(clients[1], 1) == [(b"", b"for 1")]
    assert clients[0].receive() == []
    assert clients[2].receive() == []


def test_a_peer_that_is_not_there_is_reported(network: Network, address: str) -> None:
    server = network.bind(address)
    assert server.send(b"x", b"\0nobody") is Sent.GONE
    assert server.statistics()["gone"] == 1


def test_connecting_first_is_allowed(network: Network, address: str) -> None:
    client = network.connect(address)
    assert client.send(b"early") is Sent.OK
    server = network.bind(address)
    assert [f for _, f in drain(server, 1)] == [b"early"]


def test_a_full_peer_never_blocks_the_sender(address: str) -> None:
    net = MemoryNetwork(capacity=8)
    server, client = net.bind(address), net.connect(address)
    results = [client.send(b"x") for _ in range(9)]
    assert results == [Sent.OK] * 8 + [Sent.FULL]
    assert len(server.receive()) == 8
    assert client.send(b"x") is Sent.OK
    net.close()


def test_a_full_zeromq_peer_never_blocks_the_sender(address: str) -> None:
    net = ZmqNetwork()
    server, client = net.bind(address), net.connect(address)
    assert client.send(b"hello") is Sent.OK
    peer = drain(server, 1)[0][0]
    big = bytes(1 << 16)
    sent = 0
    while sent < 100_000 and server.send(big, peer) is not Sent.FULL:  # the client never reads
        sent += 1
    assert 0 < sent < 100_000
    assert server.statistics()["full"] == 1
    net.close()


def test_a_second_bind_is_refused_by_name(network: Network, address: str) -> None:
    network.bind(address)
    with pytest.raises(AddressInUse, match=r"a\.sock is served by another process"):
        network.bind(address)


def test_a_stale_socket_file_is_replaced_and_private(tmp_path: Path) -> None:
    import socket

    path = tmp_path / "a.sock"
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(path))
    assert path.exists()  # left behind, nobody listens
    net = ZmqNetwork()
    before = os.umask(0)
    try:
        server = net.bind(f"ipc://{path}")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.close()
    assert not path.exists()
    net.close()


def test_the_pollable_is_quiet_when_nothing_waits(network: Network, address: str) -> None:
    server, client = network.bind(address), network.connect(address)
    client.send(b"x")
    drain(server, 1)
    poller = zmq.Poller()
    poller.register(server.pollable, zmq.POLLIN)
    assert poller.poll(0) == []


def test_malformed_envelopes_are_dropped_and_counted(address: str) -> None:
    net = ZmqNetwork()
    server = net.bind(address)
    ctx = zmq.Context()
    raw = ctx.socket(zmq.DEALER)
    raw.setsockopt(zmq.LINGER, 0)
    raw.connect(address)
    raw.send_multipart([b"one", b"two", b"three"])
    raw.send(b"good")
    assert [f for _, f in drain(server, 1)] == [b"good"]
    assert server.statistics()["malformed"] == 1
    raw.close()
    ctx.term()
    net.close()
