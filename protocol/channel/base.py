"""Channel: the smallest thing that moves frames between two processes.

Sends never block. A channel belongs to one thread. The ZeroMQ form and the in-memory twin pass one
contract suite (tests/protocol/channel).
"""

from enum import Enum
from typing import Any, Protocol


class Sent(Enum):
    OK = "ok"
    FULL = "full"  # the peer's buffer is full: keep the frame and try again
    GONE = "gone"  # no such peer is connected


class Channel(Protocol):
    """`peer` is the routing id that `receive` returned; a connecting channel has one peer, b""."""

    @property
    def pollable(self) -> Any:
        """What `zmq.Poller.register` takes: readable when `receive` may have something."""
        ...

    def fileno(self) -> int:
        """For event loops. Edge-triggered with ZeroMQ: after it fires, and after every batch of
        sends, call `receive` until it returns nothing."""
        ...

    def send(self, frame: bytes, peer: bytes = b"") -> Sent: ...

    def receive(self, limit: int = 512) -> list[tuple[bytes, bytes]]:
        """Up to `limit` waiting (peer, frame) pairs, without waiting. Malformed envelopes are
        dropped and counted."""
        ...

    def close(self) -> None:
        """Idempotent; frames not yet on their way are given a moment, then dropped."""
        ...

    def statistics(self) -> dict[str, int]: ...


class Network(Protocol):
    """Makes channels: `bind` listens at an address, `connect` reaches one."""

    def bind(self, address: str) -> Channel: ...

    def connect(self, address: str) -> Channel: ...

    def close(self) -> None: ...
