"""A network whose channels note what an owner's sockets carry, for the history checker."""

from collections.abc import Callable
from typing import Any

from protocol.channel.base import Channel, Network, Sent
from protocol.codec import decode
from protocol.errors import WireError
from protocol.messages import Message

Note = Callable[[bool, Any, Message], None]
"""(sent, the header's first number, message): a `Frames` header begins with the worker's life."""


class RecordingChannel:
    def __init__(self, inner: Channel, note: Note) -> None:
        self._inner = inner
        self._note = note

    @property
    def pollable(self) -> Any:
        return self._inner.pollable

    def fileno(self) -> int:
        return self._inner.fileno()

    def send(self, frame: bytes, peer: bytes = b"") -> Sent:
        sent = self._inner.send(frame, peer)
        if sent is Sent.OK:
            self._take(True, frame)
        return sent

    def receive(self, limit: int = 512) -> list[tuple[bytes, bytes]]:
        got = self._inner.receive(limit)
        for _, frame in got:
            self._take(False, frame)
        return got

    def close(self) -> None:
        self._inner.close()

    def statistics(self) -> dict[str, int]:
        return self._inner.statistics()

    def _take(self, sent: bool, frame: bytes) -> None:
        try:
            envelope = decode(frame)
        except WireError:
            return  # the client counts it
        self._note(sent, envelope.a, envelope.message)


class RecordingNetwork:
    """Wraps every channel that `inner` makes."""

    def __init__(self, inner: Network, note: Note) -> None:
        self._inner = inner
        self._note = note

    def bind(self, address: str) -> Channel:
        return RecordingChannel(self._inner.bind(address), self._note)

    def connect(self, address: str) -> Channel:
        return RecordingChannel(self._inner.connect(address), self._note)

    def close(self) -> None:
        self._inner.close()
