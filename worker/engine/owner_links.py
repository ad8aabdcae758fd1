"""The stream links of one worker: one DEALER per owner, what is kept, resent and settled.

Belongs to the postprocess thread, as its sockets do.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocol import faults
from protocol.channel.base import Channel, Network
from protocol.codec import decode
from protocol.errors import WireError
from protocol.messages import FLAG_END, Window
from protocol.session import Outbox
from protocol.stream_link import Emit, Plain, StreamSender

TICK_S = 0.1

_RECEIVE = faults.point("worker.stream.receive")
_SEND = faults.point("worker.stream.send")


@dataclass(slots=True, eq=False)
class OwnerLink:
    life: int
    endpoint: str
    channel: Channel
    outbox: Outbox
    sender: StreamSender
    stalled: bool = False
    given_up: bool = False
    ended: dict[int, deque[tuple[int, int]]] = field(default_factory=lambda: defaultdict(deque))
    """Stream → (row, count) of those whose end is on its way, oldest first."""


@dataclass(frozen=True, slots=True)
class News:
    """What links have to tell main. `lost`: owners whose link broke, with the reason."""

    settled: list[tuple[int, int]]
    stalled: list[tuple[int, bool]]
    lost: list[tuple[int, str]]


class OwnerLinks:
    def __init__(self, network: Network, worker_life: int) -> None:
        self._network = network
        self._life = worker_life
        self._links: dict[int, OwnerLink] = {}
        self._counts: Counter[str] = Counter()
        self._broken: list[tuple[int, str]] = []

    def __contains__(self, owner: int) -> bool:
        return owner in self._links

    @property
    def channels(self) -> list[Channel]:
        return [link.channel for link in self._links.values()]

    @property
    def idle(self) -> bool:
        """Every frame is acknowledged: nothing to do until somebody speaks."""
        return all(link.sender.idle for link in self._links.values())

    def up(self, owner: int, endpoint: str) -> bool:
        """True: a new channel was connected."""
        known = self._links.get(owner)
        if known is not None and known.endpoint == endpoint:
            return False
        channel = self._network.connect(endpoint)
        if known is None:
            sender = StreamSender(self._life, owner)
            self._links[owner] = OwnerLink(owner, endpoint, channel, Outbox(channel), sender)
        else:  # the owner moved: what it misses it asks for
            known.channel.close()
            known.endpoint, known.channel, known.outbox = endpoint, channel, Outbox(channel)
        return True

    def down(self, owner: int) -> bool:
        """Forget the owner and all that is kept for it."""
        link = self._links.pop(owner, None)
        if link is not None:
            link.channel.close()
        return link is not None

    def emit(
        self,
        owner: int,
        rows: Sequence[int],
        emits: Sequence[Emit],
        now: float,
        plain: Plain | None = None,
    ) -> bool:
        """One step's rows for one owner, as one `Frames`; `rows` are those of `emits`. False: no
        such owner."""
        link = self._links.get(owner)
        if link is None:
            return False
        for row, e in zip(rows, emits, strict=True):
            if e.flags & FLAG_END:
                link.ended[e.stream].append((row, e.first + len(e.tokens)))
        self._push(link, link.sender.emit(emits, now, plain))
        self._counts["emits"] += 1
        return True

    def receive(self, now: float) -> None:
        for link in list(self._links.values()):
            for _, frame in link.channel.receive():
                if _RECEIVE.act is not None:
                    _RECEIVE.act()
                try:
                    envelope = decode(frame)
                except WireError:
                    self._counts["malformed"] += 1
                    continue
                m = envelope.message
                if not isinstance(m, Window) or (envelope.a, envelope.b) != (self._life, link.life):
                    self._counts["strays"] += 1
                    continue
                self._counts["resends"] += m.resend
                self._push(link, link.sender.window(m, now))

    def tick(self, now: float) -> None:
        for link in list(self._links.values()):
            if not link.outbox.flush():
                self._broken.append((link.life, "its connection is gone"))
            self._push(link, link.sender.tick(now))

    def news(self, now: float) -> News:
        settled: list[tuple[int, int]] = []
        stalled: list[tuple[int, bool]] = []
        lost, self._broken = self._broken, []
        for link in self._links.values():
            for stream in link.sender.settled():
                rows = link.ended.get(stream)
                if rows:
                    settled.append(rows.popleft())
                if not rows:
                    link.ended.pop(stream, None)
            if link.sender.must_hold != link.stalled:
                link.stalled = link.sender.must_hold
                link.given_up = False
                stalled.append((link.life, link.stalled))
            if link.sender.must_fail(now) and not link.given_up:
                link.given_up = True
                lost.append((link.life, "it has taken nothing for too long"))
        return News(settled, stalled, lost)

    def close(self) -> None:
        for owner in list(self._links):
            self.down(owner)

    def statistics(self) -> dict[str, int]:
        senders = [link.sender.statistics() for link in list(self._links.values())]
        return {
            "owners": len(self._links),
            "frames_sent": sum(s["sent"] for s in senders),
            "unacknowledged_bytes": sum(s["in_flight_bytes"] for s in senders),
            "pending_bytes": sum(s["pending_bytes"] for s in senders),
            **self._counts,
        }

    def _push(self, link: OwnerLink, frames: list[bytes]) -> None:
        if _SEND.act is not None and frames:
            _SEND.act()
        if not link.outbox.push_all(frames):
            self._broken.append((link.life, "its backlog is over the limit"))
