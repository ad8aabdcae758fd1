"""Control sessions (protocol/session.py): two sides over a link that repeats, loses and is cut.

Within a session what is delivered is what was sent, in order, from the beginning. Over sessions a
message that must be kept is delivered at least once, and its order among the kept holds.
"""

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from protocol.channel.base import Sent
from protocol.channel.memory import MemoryNetwork
from protocol.codec import Envelope, decode
from protocol.messages import Bye, Message
from protocol.session import Outbox, Session, SessionHole
from tests.support.budget import budget, hunt

side = st.integers(0, 1)


class Sessions(RuleBasedStateMachine):
    """Messages are numbered; `Bye("k7")` is kept, `Bye("7")` is not."""

    make: Callable[..., Session] = Session

    @initialize()
    def start(self) -> None:
        self.numbers = 0
        self.kept: list[list[str]] = [[], []]  # by sender, in order
        self.heard: list[list[str]] = [[], []]  # by sender: all that was delivered
        self.sessions: list[Session] = []
        self.begin([[], []])

    def begin(self, carried: list[list[Message]]) -> None:
        """Both sides start anew; what is under way is lost with the old session."""
        number = 100 + self.numbers
        self.sessions = [type(self).make(number), type(self).make(number)]
        self.wires: list[deque[bytes]] = [deque(), deque()]
        self.sent: list[list[str]] = [[], []]
        self.got: list[list[str]] = [[], []]
        self.old: list[bytes] = getattr(self, "old", [])
        for who, messages in enumerate(carried):
            for m in messages:
                self.stamp(who, m, keep=True)

    def stamp(self, who: int, m: Message, keep: bool) -> None:
        assert isinstance(m, Bye)
        self.wires[who].append(self.sessions[who].stamp(m, keep))
        self.sent[who].append(m.reason)

    @rule(who=side, keep=st.booleans(), n=st.integers(1, 4))
    def send(self, who: int, keep: bool, n: int) -> None:
        for _ in range(n):
            self.numbers += 1
            name = f"{'k' * keep}{self.numbers}"
            if keep:
                self.kept[who].append(name)
            self.stamp(who, Bye(name), keep)

    @rule(who=side, n=st.integers(1, 6))
    def deliver(self, who: int, n: int) -> None:
        """From side `who` to the other."""
        for _ in range(n):
            if self.wires[who] and not self.accept(who, self.wires[who].popleft()):
                return

    @rule(who=side, which=st.integers(0, 3))
    def repeat(self, who: int, which: int) -> None:
        wire = self.wires[who]
        if wire:
            data = wire[which % len(wire)]
            wire.insert(which % len(wire), data)
            self.old.append(data)

    @rule(who=side, which=st.integers(0, 3))
    def lose(self, who: int, which: int) -> None:
        if self.wires[who]:
            del self.wires[who][which % len(self.wires[who])]

    @rule()
    def cut(self) -> None:
        self.old += [*self.wires[0], *self.wires[1]]
        self.begin([s.carry_over() for s in self.sessions])

    @rule(who=side, which=st.integers(0, 9))
    def a_frame_of_another_session(self, who: int, which: int) -> None:
        if self.old:
            self.wires[who].appendleft(self.old[which % len(self.old)])

    def teardown(self) -> None:
        if not self.sessions:
            return
        for _ in range(3):  # the last messages are acknowledged by an answer
            for who in (0, 1):
                self.send(who, False, 1)
                self.deliver(who, 10_000)
        for who in (0, 1):
            first = {m: self.heard[who].index(m) for m in self.kept[who] if m in self.heard[who]}
            assert list(first) == self.kept[who], "a message that was to be kept is lost"
            assert sorted(first.values()) == list(first.values()), "kept, but out of order"
            assert self.sessions[who].carry_over() == [], "acknowledged, yet kept"

    # ---- inside

    def accept(self, who: int, data: bytes) -> bool:
        """False: the session ended."""
        e = decode(data)
        receiver = self.sessions[1 - who]
        before = len(self.got[who])
        try:
            new = receiver.accept(e)
        except SessionHole:
            assert e.a == receiver.number
            assert e.b > before + 1, "no hole"
            self.cut()
            return False
        if new:
            assert isinstance(e.message, Bye)
            self.got[who].append(e.message.reason)
            self.heard[who].append(e.message.reason)
        assert self.got[who] == self.sent[who][: len(self.got[who])], "not what was sent, in order"
        unheard = [m for m in self.sent[1 - who] if m not in self.got[1 - who]]
        kept = [m.reason for m in receiver.carry_over() if isinstance(m, Bye)]
        assert [m for m in kept if m in unheard] == [m for m in unheard if m.startswith("k")], (
            "given up before it was delivered"
        )
        return True


def test_sessions_deliver_in_order_and_keep_what_must_be_kept() -> None:
    run_machine(Sessions, settings=budget(60))


class ForgetsEarly(Session):
    def accept(self, envelope: Envelope) -> bool:
        return super().accept(Envelope(envelope.message, envelope.a, envelope.b, envelope.c + 1))


class NeverForgets(Session):
    def accept(self, envelope: Envelope) -> bool:
        return super().accept(Envelope(envelope.message, envelope.a, envelope.b, 0))


class TakesHoles(Session):
    def accept(self, envelope: Envelope) -> bool:
        if envelope.a == self.number:
            self._received = max(self._received, envelope.b - 1)
        return super().accept(envelope)


class TakesRepeats(Session):
    def accept(self, envelope: Envelope) -> bool:
        return super().accept(envelope) or (
            envelope.a == self.number and envelope.b == self._received
        )


class TakesOtherSessions(Session):
    def accept(self, envelope: Envelope) -> bool:
        e = envelope
        return super().accept(Envelope(e.message, self.number, e.b, e.c))


class CarriesBackwards(Session):
    def carry_over(self) -> list[Message]:
        return super().carry_over()[::-1]


@pytest.mark.parametrize(
    "broken",
    [ForgetsEarly, NeverForgets, TakesHoles, TakesRepeats, TakesOtherSessions, CarriesBackwards],
)
def test_it_finds_a_planted_bug(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Sessions, "make", broken)
    with pytest.raises(AssertionError):
        run_machine(Sessions, settings=hunt(300))


# ---- what a channel has no room for waits, in order and bounded

CAPACITY, LIMIT = 3, 600


class Backlog(RuleBasedStateMachine):
    """An `Outbox` before a channel that takes 3 frames, read when the other side feels like it."""

    make: Callable[..., Outbox] = Outbox

    @initialize()
    def start(self) -> None:
        self.network = MemoryNetwork(CAPACITY)
        self.reader = self.network.bind("memory://reader")
        self.outbox = type(self).make(self.network.connect("memory://reader"), limit=LIMIT)
        self.pushed: list[bytes] = []
        self.read: list[bytes] = []
        self.over = False

    @rule(size=st.integers(8, 150), n=st.integers(1, 5))
    def push(self, size: int, n: int) -> None:
        for _ in range(n):
            if self.over:
                return  # after an overflow the link is useless
            frame = len(self.pushed).to_bytes(8, "big").ljust(size, b".")
            waited = self.outbox.statistics()["waiting_bytes"]
            ok = self.outbox.push(frame)
            self.pushed.append(frame)
            assert ok or waited + size > LIMIT, "an overflow below the limit"
            self.over = not ok
            assert self.outbox.statistics()["waiting_bytes"] <= LIMIT + 150

    @rule(n=st.integers(1, 4))
    def read_some(self, n: int) -> None:
        self.read += [frame for _, frame in self.reader.receive(n)]
        assert self.read == self.pushed[: len(self.read)], "out of order"

    @rule()
    def flush(self) -> None:
        assert self.outbox.flush()

    def teardown(self) -> None:
        if not hasattr(self, "network"):
            return
        for _ in range(len(self.pushed) + 1):
            self.read_some(100)
            self.flush()
        assert self.read == self.pushed
        assert self.outbox.statistics() == {"waiting_frames": 0, "waiting_bytes": 0}
        self.network.close()


def test_a_backlog_keeps_order_and_is_bounded() -> None:
    run_machine(Backlog, settings=budget(40))


class Overtakes(Outbox):
    def push(self, frame: bytes) -> bool:
        if self._channel.send(frame, self.peer) is Sent.OK:
            return True
        return super().push(frame)


class Unbounded(Outbox):
    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **{**more, "limit": 1 << 40})


class LosesOne(Outbox):
    def flush(self) -> bool:
        if len(self._waiting) > 3:
            self._bytes -= len(self._waiting.popleft())
        return super().flush()


@pytest.mark.parametrize("broken", [Overtakes, Unbounded, LosesOne])
def test_the_backlog_machine_finds_a_planted_bug(
    broken: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Backlog, "make", broken)
    with pytest.raises(AssertionError):
        run_machine(Backlog, settings=hunt(300))
