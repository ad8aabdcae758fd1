"""The control link to the conductor: sessions, reports that are kept, beats. Main thread.

Owns one DEALER. Whatever ends a session (a hole, `Refuse(resync)`, a backlog over its limit) leads
to a new `Hello` with an inventory; row ends stay in it until the conductor has acknowledged them.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from protocol import PROTOCOL_VERSION, columns, faults
from protocol.channel.base import Channel
from protocol.clock import Clock
from protocol.codec import Envelope, decode
from protocol.errors import PodiumError, WireError
from protocol.messages import Beat, Bye, Hello, Kind, Message, Refuse, Report, Welcome
from protocol.session import Outbox, Session, SessionHole
from worker.micro_scheduler.decisions import Say

SILENCE_S = 10.0  # rule 21: without a conductor this long, a worker clears everything
FIRST_BEAT_MS = 200  # until Welcome says otherwise

End = list[Any]  # [row, kind, value, extra]

_RECEIVE = faults.point("worker.control.receive")
_SEND = faults.point("worker.control.send")


class Refused(PodiumError):
    """The conductor does not take this worker (fenced, name_taken, version): it must exit."""

    code = "refused"


class ConductorSilent(PodiumError):
    code = "conductor_silent"


class ConductorLink:
    """`inventory()` is asked at each `Hello`: `{"rows": …, "batches": …}`."""

    def __init__(
        self,
        channel: Channel,
        clock: Clock,
        hello: Callable[[dict[str, Any]], Hello],
        inventory: Callable[[], dict[str, Any]],
    ) -> None:
        self._channel = channel
        self._clock = clock
        self._hello = hello
        self._inventory = inventory
        self._session = Session()
        self._outbox = Outbox(channel)
        self._ends: list[End] = []  # of earlier sessions, not acknowledged
        self._must_open = False
        self._counts: Counter[str] = Counter()
        self.welcomed = False
        self.beat_s = FIRST_BEAT_MS / 1000
        self._heard_at = clock.monotonic()
        self._beat_at = 0.0

    # ---- sessions

    def open(self) -> None:
        """Start a session. The first message carries all that the conductor must know."""
        self._must_open = False
        self.welcomed = False
        self._ends = unacknowledged(self._session.carry_over())
        self._session = Session()
        self._outbox = Outbox(self._channel)
        inventory = {"ends": self._ends, **self._inventory()}
        self._send(self._hello(inventory), keep=bool(self._ends))
        self._counts["sessions"] += 1

    def receive(self) -> list[Message]:
        """What the conductor says, in order. Raises `Refused`; a broken session is opened anew."""
        got: list[Message] = []
        for _, frame in self._channel.receive():
            if _RECEIVE.act is not None:
                _RECEIVE.act()
            try:
                envelope = decode(frame)
            except WireError:
                self._counts["malformed"] += 1  # if it was one of ours, a hole will show
                continue
            self._heard_at = self._clock.monotonic()
            if isinstance(envelope.message, Refuse):
                self._refused(envelope, envelope.message)
            elif self._accept(envelope):
                got.append(envelope.message)
        if self._must_open:
            self.open()
        return got

    def _accept(self, envelope: Envelope) -> bool:
        if self._must_open:
            return False  # the session is over: what follows a hole belongs to nothing
        try:
            new = self._session.accept(envelope)
        except SessionHole:
            self._counts["holes"] += 1
            self._must_open = True
            return False
        if not new:
            self._counts["strays"] += 1
        elif isinstance(envelope.message, Welcome):
            self.welcomed = True
            self.beat_s = envelope.message.beat_ms / 1000
        return new

    def _refused(self, envelope: Envelope, refuse: Refuse) -> None:
        """It may come outside the numbering: whoever sends it has no session with us."""
        if envelope.a != self._session.number:
            self._counts["strays"] += 1
        elif refuse.code == "resync":
            self._counts["resyncs"] += 1
            self._must_open = True
        else:
            raise Refused(f"the conductor refuses this worker ({refuse.code}): {refuse.text}")

    # ---- sending

    def report(self, lines: Sequence[Say], acked: Sequence[int] = ()) -> None:
        """One `Report`. Ends in it are kept until they are acknowledged. `acked` by index."""
        if not lines:
            return
        message = Report(
            row=columns.u64([s.row for s in lines]),
            kind=columns.u8([s.kind for s in lines]),
            value=columns.u32([s.value for s in lines]),
            acked=columns.u32(acked or [0] * len(lines)),
            extras={i: s.extra for i, s in enumerate(lines) if s.extra},
        )
        self._send(message, keep=any(s.kind.ends for s in lines))

    def say(self, message: Message) -> None:
        self._send(message, keep=False)

    def beat(self, make: Callable[[], Beat]) -> None:
        """Send a `Beat` if one is due."""
        now = self._clock.monotonic()
        if now >= self._beat_at:
            self._beat_at = now + self.beat_s
            self._send(make(), keep=False)

    def check_silence(self) -> None:
        """Raises `ConductorSilent` when nothing was heard for too long."""
        silent = self._clock.monotonic() - self._heard_at
        if silent > SILENCE_S:
            raise ConductorSilent(f"nothing heard of the conductor for {silent:.1f} s")

    def until_beat(self) -> float:
        """Seconds until the next beat is due."""
        return max(0.0, self._beat_at - self._clock.monotonic())

    def flush(self) -> None:
        if not self._outbox.flush():
            self._must_open = True

    def bye(self, reason: str) -> None:
        self._send(Bye(reason), keep=False)

    def close(self) -> None:
        self._channel.close()

    def statistics(self) -> dict[str, int]:
        counts = self._counts + Counter(self._channel.statistics())
        return {**counts, **self._outbox.statistics()}

    def _send(self, message: Message, keep: bool) -> None:
        if _SEND.act is not None:
            _SEND.act()
        if not self._outbox.push(self._session.stamp(message, keep)):
            self._counts["overflows"] += 1
            self._must_open = True


def unacknowledged(kept: Sequence[Message]) -> list[End]:
    """Row ends in messages that the other side has not acknowledged, oldest first, each once."""
    ends: dict[int, End] = {}
    for message in kept:
        if isinstance(message, Hello):
            for end in message.inventory.get("ends", ()):
                ends.setdefault(end[0], list(end))
        elif isinstance(message, Report):
            for i, (row, kind, value) in enumerate(
                zip(message.row, message.kind, message.value, strict=True)
            ):
                if Kind(kind).ends:
                    ends.setdefault(row, [row, kind, value, message.extras.get(i, {})])
    return list(ends.values())


def versions() -> list[int]:
    return [PROTOCOL_VERSION]
