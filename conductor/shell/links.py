"""The control ROUTER: frames in, events out; one session per peer.

Frames of an unknown peer, of another session, or of no meaning are dropped and counted. Where the
peer can do something about it, it is told: `Refuse(resync)` asks for a new `Hello`,
`Refuse(version)` says that nothing can be understood, in a form that every version reads (the
header's first five numbers and `Refuse`'s layout never change).
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import msgpack

from conductor.core.events import Event, LinkDown, Received
from protocol import PROTOCOL_VERSION, faults
from protocol.channel.base import Channel, Sent
from protocol.codec import Envelope, decode, encode
from protocol.errors import BadMessage, VersionMismatch
from protocol.messages import Hello, Message, Refuse
from protocol.session import Outbox, Session, SessionHole
from protocol.stats import LinkStats

_BATCHES = 8  # of 512 frames, before other work gets a turn
_RECEIVE = faults.point("conductor.receive")


@dataclass(slots=True)
class _Link:
    life: int
    peer: bytes
    session: Session
    outbox: Outbox
    pressed: bool = False  # something waits in the outbox


class Links:
    """`deliver` takes the events, in link order. It may call back into `send` and `forget`."""

    def __init__(self, channel: Channel, deliver: Callable[[Event], None]) -> None:
        self._channel = channel
        self._deliver = deliver
        self._by_peer: dict[bytes, _Link] = {}
        self._by_life: dict[int, _Link] = {}
        self._dropped: Counter[str] = Counter()
        self._refused = 0

    def receive(self) -> bool:
        """Take what waits, and send on what waited. True: there may be more, call again soon.

        The socket's descriptor is edge-triggered: call this when it fires and after every batch of
        sends, or the next edge may never come.
        """
        more = True
        for _ in range(_BATCHES):
            frames = self._channel.receive()
            if not frames:
                more = False
                break
            for peer, frame in frames:
                self._take(peer, frame)
        self._flush()
        return more

    def send(self, life: int, message: Message) -> bool:
        """False: no session with this life. A backlog that overflows ends the session."""
        link = self._by_life.get(life)
        if link is None:
            return False
        self._push(link, link.session.stamp(message))
        return True

    def forget(self, life: int) -> None:
        link = self._by_life.pop(life, None)
        if link is not None:
            self._by_peer.pop(link.peer, None)

    def reset(self, life: int) -> None:
        """End the session of this life and ask the peer for a new `Hello`."""
        link = self._by_life.get(life)
        if link is not None:
            self.send(life, Refuse("resync", "the conductor lost its place: say Hello again"))
            self._down(link, "reset by the conductor")

    def known(self, life: int) -> bool:
        return life in self._by_life

    def statistics(self) -> LinkStats:
        counts = self._channel.statistics()
        waiting = (x.outbox.statistics()["waiting_bytes"] for x in self._by_life.values())
        dropped = dict(self._dropped)
        if counts["malformed"]:
            dropped["malformed"] = dropped.get("malformed", 0) + counts["malformed"]
        return {
            "peers": len(self._by_life),
            "sent": counts["sent"],
            "received": counts["received"],
            "refused": self._refused,
            "waiting_bytes": sum(waiting),
            "dropped": dropped,
        }

    # ---- inside

    def _take(self, peer: bytes, frame: bytes) -> None:
        if _RECEIVE.act is not None:
            _RECEIVE.act()
        try:
            envelope = decode(frame)
        except VersionMismatch:
            self._dropped["version"] += 1
            self._refuse_version(peer, frame)
            return
        except BadMessage:
            self._dropped["malformed"] += 1
            return
        if isinstance(envelope.message, Hello):
            self._hello(peer, envelope, envelope.message)
            return
        link = self._by_peer.get(peer)
        if link is None:
            self._dropped["unknown_peer"] += 1
            self._refuse(peer, envelope, "resync", "no session with this peer: say Hello")
            return
        self._accept(link, envelope)

    def _accept(self, link: _Link, envelope: Envelope) -> None:
        try:
            new = link.session.accept(envelope)
        except SessionHole as e:
            self._dropped["hole"] += 1
            self._refuse(link.peer, envelope, "resync", e.message)
            self._down(link, e.message)
            return
        if new:
            self._deliver(Received(link.life, envelope.message))
        else:
            self._dropped["stale"] += 1

    def _hello(self, peer: bytes, envelope: Envelope, hello: Hello) -> None:
        if PROTOCOL_VERSION not in hello.versions:
            self._dropped["version"] += 1
            self._refuse(peer, envelope, "version", _versions(hello.versions))
            return
        old = self._by_life.get(hello.life)
        if old is not None and old.peer == peer and old.session.number == envelope.a:
            self._accept(old, envelope)  # a repeat, or a peer that skipped its own numbers
            return
        if envelope.b != 1:
            self._dropped["hole"] += 1
            self._refuse(peer, envelope, "resync", "Hello must be a session's first message")
            return
        self.forget(hello.life)
        other = self._by_peer.get(peer)
        if other is not None:  # one connection, another process: the first one is gone
            self._down(other, f"its connection now speaks for life {hello.life:#x}")
        link = _Link(hello.life, peer, Session(envelope.a), Outbox(self._channel, peer))
        self._by_peer[peer] = self._by_life[hello.life] = link
        self._accept(link, envelope)

    def _refuse(self, peer: bytes, envelope: Envelope, code: str, text: str) -> None:
        """In the session that the peer believes in, as the message that it expects next."""
        self._refuse_in(peer, code, text, (envelope.a, envelope.c + 1, envelope.b))

    def _refuse_version(self, peer: bytes, frame: bytes) -> None:
        version, _, session, seq, ack = msgpack.unpackb(frame, strict_map_key=False)[:5]
        text = _versions([version])
        self._refuse_in(peer, "version", text, (session, ack + 1, seq), version)

    def _refuse_in(
        self,
        peer: bytes,
        code: str,
        text: str,
        header: tuple[int, int, int],
        version: int = PROTOCOL_VERSION,
    ) -> None:
        if header[1] >= 1 << 64:
            return
        self._refused += 1
        # No outbox: who floods us with nonsense gets no memory of ours.
        if self._channel.send(encode(Refuse(code, text), *header, version), peer) is not Sent.OK:
            self._dropped["refusal"] += 1

    def _push(self, link: _Link, frame: bytes) -> None:
        if not link.outbox.push(frame):
            self._down(link, "its backlog is over the limit, or its connection is gone")
        elif link.outbox.statistics()["waiting_frames"]:
            link.pressed = True

    def _flush(self) -> None:
        for link in [x for x in self._by_life.values() if x.pressed]:
            if not link.outbox.flush():
                self._down(link, "its connection is gone")
            link.pressed = link.outbox.statistics()["waiting_frames"] > 0

    def _down(self, link: _Link, why: str) -> None:
        if self._by_life.get(link.life) is link:
            self.forget(link.life)
            self._deliver(LinkDown(link.life, why))


def _versions(theirs: list[int]) -> str:
    return f"this conductor speaks protocol version {PROTOCOL_VERSION}, the peer {theirs}"
