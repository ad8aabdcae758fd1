"""The in-memory twin of the ZeroMQ channels: same contract, one process, no sockets.

Frames are bytes here too, so a test that passes over this network has encoded and decoded all it
sent. `capacity` is how many frames a peer buffers before `Sent.FULL`.
"""

import itertools
import os
import threading
from collections import deque

from protocol.channel.base import Channel, Sent
from protocol.channel.zeromq import AddressInUse


class _Box:
    """A bounded queue with an eventfd that is readable while it holds something."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.lock = threading.Lock()
        self.frames: deque[tuple[bytes, bytes]] = deque()
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.open = True

    def put(self, peer: bytes, frame: bytes) -> Sent:
        with self.lock:
            if not self.open:
                return Sent.GONE
            if sum(1 for p, _ in self.frames if p == peer) >= self.capacity:
                return Sent.FULL
            if not self.frames:
                os.eventfd_write(self.fd, 1)
            self.frames.append((peer, frame))
            return Sent.OK

    def take(self, limit: int) -> list[tuple[bytes, bytes]]:
        with self.lock:
            got = [self.frames.popleft() for _ in range(min(limit, len(self.frames)))]
            if got and not self.frames:
                os.eventfd_read(self.fd)
            return got

    def close(self) -> None:
        with self.lock:
            if self.open:
                self.open = False
                self.frames.clear()
                os.close(self.fd)


class MemoryChannel:
    def __init__(self, network: "MemoryNetwork", address: str, bound: bool) -> None:
        self._network = network
        self.address = address
        self._bound = bound
        self.box = _Box(network.capacity)
        self.peers: dict[bytes, MemoryChannel] = {}  # of a bound channel
        self.routing_id = b""  # of a connected channel
        self._waiting: deque[bytes] = deque()  # sent before the other side bound
        self._counts = {"sent": 0, "received": 0, "full": 0, "gone": 0, "malformed": 0}

    @property
    def pollable(self) -> int:
        return self.box.fd

    def fileno(self) -> int:
        return self.box.fd

    def send(self, frame: bytes, peer: bytes = b"") -> Sent:
        result = self._send(bytes(frame), peer)
        self._counts["sent" if result is Sent.OK else result.value] += 1
        return result

    def _send(self, frame: bytes, peer: bytes) -> Sent:
        if self._bound:
            target = self.peers.get(peer)
            return target.box.put(b"", frame) if target is not None else Sent.GONE
        server = self._network.servers.get(self.address)
        if server is None:  # as with ZeroMQ, a connection may be made before its address is bound
            if len(self._waiting) >= self._network.capacity:
                return Sent.FULL
            self._waiting.append(frame)
            return Sent.OK
        self.attach(server)
        return server.box.put(self.routing_id, frame)

    def attach(self, server: "MemoryChannel") -> None:
        if self.routing_id not in server.peers:
            self.routing_id = self._network.new_routing_id()
            server.peers[self.routing_id] = self
        while self._waiting:
            server.box.put(self.routing_id, self._waiting.popleft())

    def receive(self, limit: int = 512) -> list[tuple[bytes, bytes]]:
        got = self.box.take(limit)
        self._counts["received"] += len(got)
        return got

    def close(self) -> None:
        self.box.close()
        self._network.detach(self, self.address)

    def statistics(self) -> dict[str, int]:
        return dict(self._counts)


class MemoryNetwork:
    def __init__(self, capacity: int = 4096) -> None:
        self.capacity = capacity
        self.servers: dict[str, MemoryChannel] = {}
        self._clients: list[MemoryChannel] = []
        self._ids = itertools.count(1)

    def new_routing_id(self) -> bytes:
        return b"\0" + next(self._ids).to_bytes(4, "big")

    def bind(self, address: str) -> Channel:
        if address in self.servers:
            raise AddressInUse(f"{address} is served by another process")
        server = MemoryChannel(self, address, bound=True)
        self.servers[address] = server
        for c in list(self._clients):
            if c.address == address:
                c.attach(server)
        return server

    def connect(self, address: str) -> Channel:
        client = MemoryChannel(self, address, bound=False)
        self._clients.append(client)
        server = self.servers.get(address)
        if server is not None:
            client.attach(server)
        return client

    def detach(self, channel: MemoryChannel, address: str) -> None:
        if self.servers.get(address) is channel:
            del self.servers[address]
        if channel in self._clients:
            self._clients.remove(channel)
        server = self.servers.get(address)
        if server is not None:
            server.peers.pop(channel.routing_id, None)

    def close(self) -> None:
        for c in [*self.servers.values(), *self._clients]:
            c.close()
