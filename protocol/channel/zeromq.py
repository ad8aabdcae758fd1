"""Channels over ZeroMQ: ROUTER where an address is bound, DEALER where it is connected."""

import os
import stat
import threading
from pathlib import Path
from typing import Any

import zmq

from protocol.channel.base import Channel, Sent
from protocol.codec import MAX_FRAME
from protocol.errors import PodiumError

HIGH_WATER = 4096  # frames buffered per peer by ZeroMQ, before `Sent.FULL`
LINGER_MS = 200
_NOW = int(zmq.DONTWAIT)  # plain numbers: pyzmq's enums cost a microsecond to combine
_MORE = int(zmq.DONTWAIT | zmq.SNDMORE)


class AddressInUse(PodiumError):
    code = "address_in_use"


class ZmqChannel:
    def __init__(self, socket: "zmq.Socket[bytes]", routed: bool, path: Path | None = None) -> None:
        self._socket = socket
        self._routed = routed
        self._path = path
        self._counts = {"sent": 0, "received": 0, "full": 0, "gone": 0, "malformed": 0}

    @property
    def pollable(self) -> Any:
        return self._socket

    def fileno(self) -> int:
        return int(self._socket.getsockopt(zmq.FD))

    def send(self, frame: bytes, peer: bytes = b"") -> Sent:
        try:
            if self._routed:  # the peer's part takes the room, or finds that there is none
                self._socket.send(peer, _MORE)
            self._socket.send(frame, _NOW)
        except zmq.Again:
            self._counts["full"] += 1
            return Sent.FULL
        except zmq.ZMQError as e:
            if e.errno != zmq.EHOSTUNREACH:
                raise
            self._counts["gone"] += 1
            return Sent.GONE
        self._counts["sent"] += 1
        return Sent.OK

    def receive(self, limit: int = 512) -> list[tuple[bytes, bytes]]:
        got: list[tuple[bytes, bytes]] = []
        receive, routed = self._socket.recv, self._routed
        try:
            while len(got) < limit:
                # Parts as frames: asking the socket whether more parts follow costs as much again.
                peer = receive(_NOW, copy=False) if routed else None
                part = receive(_NOW, copy=False) if peer is None or peer.more else None
                if part is None or part.more:
                    self._counts["malformed"] += 1
                    while part is not None and part.more:
                        part = receive(_NOW, copy=False)
                    continue
                got.append((peer.bytes if peer is not None else b"", part.bytes))
        except zmq.Again:
            pass
        self._counts["received"] += len(got)
        return got

    @property
    def closed(self) -> bool:
        return bool(self._socket.closed)

    def close(self) -> None:
        if not self._socket.closed:
            self._socket.close()
            if self._path is not None:
                self._path.unlink(missing_ok=True)

    def statistics(self) -> dict[str, int]:
        return dict(self._counts)


class ZmqNetwork:
    """One ZeroMQ context. `bind` refuses an ipc path that another process still serves.

    A second bind on an ipc path would take over its traffic in silence; the caller's lock on the
    runtime directory is what prevents that between daemons, the check here is what names it.
    """

    def __init__(self) -> None:
        self._context = zmq.Context()
        self._channels: list[ZmqChannel] = []
        self._lock = threading.Lock()  # each channel has one thread; the network has them all

    def _made(self, channel: ZmqChannel) -> ZmqChannel:
        with self._lock:
            self._channels = [c for c in self._channels if not c.closed]
            self._channels.append(channel)
        return channel

    def _prepare(self, kind: int) -> "zmq.Socket[bytes]":
        s = self._context.socket(kind)
        s.setsockopt(zmq.LINGER, LINGER_MS)
        s.setsockopt(zmq.SNDHWM, HIGH_WATER)
        s.setsockopt(zmq.RCVHWM, HIGH_WATER)
        s.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME)  # a peer that sends more is dropped
        return s

    def bind(self, address: str) -> Channel:
        path = Path(address.removeprefix("ipc://")) if address.startswith("ipc://") else None
        if path is not None and path.exists():
            if _somebody_listens(path):
                raise AddressInUse(f"{path} is served by another process")
            path.unlink()
        s = self._prepare(zmq.ROUTER)
        s.setsockopt(zmq.ROUTER_MANDATORY, 1)
        before = os.umask(0o177)
        try:
            s.bind(address)
        except zmq.ZMQError as e:
            s.close()
            raise AddressInUse(f"cannot bind {address}: {e}") from None
        finally:
            os.umask(before)
        if path is not None and stat.S_IMODE(path.stat().st_mode) & 0o077:
            path.chmod(0o600)
        return self._made(ZmqChannel(s, routed=True, path=path))

    def connect(self, address: str) -> Channel:
        s = self._prepare(zmq.DEALER)
        s.setsockopt(zmq.RECONNECT_IVL, 50)
        s.connect(address)
        return self._made(ZmqChannel(s, routed=False))

    def close(self) -> None:
        """Closes every channel made here; call it when their threads have stopped."""
        for channel in self._channels:
            channel.close()
        self._context.term()


def _somebody_listens(path: Path) -> bool:
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
    return True
