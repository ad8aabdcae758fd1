"""Control sessions (docs/wire.md, "Links"): sequence numbers, acknowledgements, what is kept.

Pure: bytes and envelopes in, bytes out. The connecting side mints a session at each `Hello`; a hole
in the sequence ends it, and the peer says `Hello` again with its inventory.
"""

import secrets
from collections import OrderedDict, deque
from collections.abc import Iterable

from protocol.channel.base import Channel, Sent
from protocol.codec import Envelope, encode
from protocol.errors import WireError
from protocol.messages import Message


class SessionHole(WireError):
    code = "resync"


class Session:
    """One side of one session.

    `kept` are messages that must survive the session (row ends, `Closed`): they stay until the
    other side acknowledged them; `carry_over` hands them to the next session.
    """

    def __init__(self, number: int | None = None) -> None:
        self.number = number if number is not None else secrets.randbits(63) or 1
        self._sent = 0
        self._received = 0
        self._kept: OrderedDict[int, Message] = OrderedDict()

    @property
    def received(self) -> int:
        return self._received

    def stamp(self, message: Message, keep: bool = False) -> bytes:
        """Encode as the next frame of this session."""
        self._sent += 1
        if keep:
            self._kept[self._sent] = message
        return encode(message, self.number, self._sent, self._received)

    def accept(self, envelope: Envelope) -> bool:
        """True: deliver the message. False: another session's, or a repeat. Raises SessionHole."""
        if envelope.a != self.number:
            return False
        if envelope.b <= self._received:
            return False
        if envelope.b != self._received + 1:
            raise SessionHole(
                f"session {self.number:#x}: message {self._received + 1} is missing, "
                f"{envelope.b} arrived"
            )
        self._received = envelope.b
        while self._kept and next(iter(self._kept)) <= envelope.c:
            self._kept.popitem(last=False)
        return True

    def carry_over(self) -> list[Message]:
        """What the other side has not acknowledged, oldest first."""
        return list(self._kept.values())


class Outbox:
    """Frames for one peer that its channel has not taken yet; bounded in bytes.

    `push` and `flush` never block. After an overflow the link is useless: the caller ends it.
    """

    def __init__(self, channel: Channel, peer: bytes = b"", limit: int = 64 << 20) -> None:
        self.peer = peer
        self._channel = channel
        self._limit = limit
        self._waiting: deque[bytes] = deque()
        self._bytes = 0

    def push(self, frame: bytes) -> bool:
        """False: the backlog is over its limit, or the peer is gone."""
        if self._waiting and not self.flush():
            return False
        if not self._waiting:
            result = self._channel.send(frame, self.peer)
            if result is Sent.OK:
                return True
            if result is Sent.GONE:
                return False
        self._waiting.append(frame)
        self._bytes += len(frame)
        return self._bytes <= self._limit

    def push_all(self, frames: Iterable[bytes]) -> bool:
        ok = True
        for f in frames:
            ok = self.push(f) and ok
        return ok

    def flush(self) -> bool:
        """Try what waits. False: the peer is gone."""
        while self._waiting:
            result = self._channel.send(self._waiting[0], self.peer)
            if result is Sent.FULL:
                return True
            if result is Sent.GONE:
                return False
            self._bytes -= len(self._waiting.popleft())
        return True

    def statistics(self) -> dict[str, int]:
        return {"waiting_frames": len(self._waiting), "waiting_bytes": self._bytes}
