"""The stream link under loss, repeats, reordering, and owners that stop reading.

Whatever the network does to frames, the owner gets each row's tokens once and in order, the worker
learns of each end that was taken, and what waits is bounded by what was to be said.
"""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from protocol import stream_link
from protocol.codec import decode
from protocol.messages import FLAG_END, Frames, Window
from protocol.stream_link import Emit, StreamReceiver, StreamSender
from tests.support.budget import budget, hunt

WORKER, OWNER = 11, 22
SMALL = {"WINDOW_BYTES": 400, "HOLD_BYTES": 600, "ACK_BYTES": 100, "ACK_EVERY": 4}
FRAME = 200  # bytes: more than a frame's overhead

streams = st.integers(1, 4)


class StreamLink(RuleBasedStateMachine):
    """`make_sender`, `make_receiver`: for tests that plant a bug."""

    make_sender: Callable[[int, int], StreamSender] = StreamSender
    make_receiver: Callable[[int, int], StreamReceiver] = StreamReceiver

    @initialize()
    def start(self) -> None:
        self.now = 100.0
        self.sender = type(self).make_sender(WORKER, OWNER)
        self.receiver = type(self).make_receiver(WORKER, OWNER)
        self.to_owner: list[bytes] = []
        self.to_worker: list[bytes] = []
        self.emitted: dict[int, list[int]] = {}
        self.got: dict[int, list[int]] = {}
        self.ended: set[int] = set()
        self.end_seen: set[int] = set()
        self.settled: list[int] = []
        self.reads = True
        self.most_waiting = 0

    # ---- the worker

    @rule(
        rows=st.dictionaries(streams, st.integers(0, 60), min_size=1),
        end=st.booleans(),
        times=st.integers(1, 12),
    )
    def emit(self, rows: dict[int, int], end: bool, times: int) -> None:
        """Steps of these rows, one after another; the last may end them."""
        for left in reversed(range(times)):
            self.step(rows, end and not left)

    def step(self, rows: dict[int, int], end: bool) -> None:
        emits: list[Emit] = []
        for stream, n in rows.items():
            if stream in self.ended:
                continue
            known = self.emitted.setdefault(stream, [])
            tokens = [1000 * stream + len(known) + k for k in range(n)]
            emits.append(Emit(stream, 1, 0, len(known), tokens, FLAG_END if end else 0, int(end)))
            known += tokens
            if end:
                self.ended.add(stream)
        self.to_owner += self.sender.emit(emits, self.now)
        self.news()

    @rule(seconds=st.sampled_from([0.0, 0.1, 0.6]))
    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.to_owner += self.sender.tick(self.now)
        if self.reads:
            self.to_worker += self.receiver.tick(self.now)
        self.news()

    # ---- the network

    @rule(reads=st.booleans())
    def owner_stops_or_goes_on(self, reads: bool) -> None:
        self.reads = reads

    @rule(window=st.integers(0, 3), n=st.integers(1, 20))
    def deliver(self, window: int, n: int) -> None:
        """Frames arrive, each ahead of up to `window` others."""
        for _ in range(n):
            if self.to_owner and self.reads:
                self.arrive(self.to_owner.pop(min(window, len(self.to_owner) - 1)))

    @rule(window=st.integers(0, 3), n=st.integers(1, 10))
    def answer(self, window: int, n: int) -> None:
        for _ in range(n):
            if self.to_worker:
                data = self.to_worker.pop(min(window, len(self.to_worker) - 1))
                self.heard(decode(data).message)

    @rule(which=st.integers(0, 5), down=st.booleans())
    def lose(self, which: int, down: bool) -> None:
        wire = self.to_owner if down else self.to_worker
        if wire:
            wire.pop(which % len(wire))

    @rule(which=st.integers(0, 5), down=st.booleans())
    def repeat(self, which: int, down: bool) -> None:
        wire = self.to_owner if down else self.to_worker
        if wire:
            wire.append(wire[which % len(wire)])

    # ---- what always holds

    @invariant()
    def bounded(self) -> None:
        if not hasattr(self, "sender"):
            return
        s = self.sender.statistics()
        assert s["acked"] <= s["sent"]
        self.most_waiting = max(self.most_waiting, s["pending_bytes"])
        biggest = FRAME + max(4 * 4 * 60, self.most_waiting)  # what waited goes in one frame
        assert s["in_flight_bytes"] <= SMALL["WINDOW_BYTES"] + biggest + FRAME, "no window"
        assert self.sender.must_hold == (s["pending_bytes"] > SMALL["HOLD_BYTES"])
        assert not self.sender.must_fail(self.now) or self.sender.must_hold
        assert len(self.settled) == len(set(self.settled)), "settled twice"
        assert set(self.settled) <= self.end_seen, "settled before the owner took the end"

    def teardown(self) -> None:
        if not hasattr(self, "sender"):
            return
        self.reads = True
        for _ in range(200):
            self.deliver(0, 1000)
            self.answer(0, 1000)
            self.tick(0.6)
            if self.sender.idle and not self.to_owner:
                break
        assert self.sender.idle, f"not at rest: {self.sender.statistics()}"
        said = {s: t for s, t in self.emitted.items() if t}
        assert {s: t for s, t in self.got.items() if t} == said, "lost"
        assert set(self.settled) == self.end_seen == self.ended
        assert self.sender.statistics()["pending_bytes"] == 0
        assert self.sender.statistics()["in_flight_bytes"] == 0

    # ---- inside

    def arrive(self, data: bytes) -> None:
        e = decode(data)
        assert (e.a, e.b) == (WORKER, OWNER)
        deliver, answers = self.receiver.accept(e.c, len(data), self.now)
        self.to_worker += answers
        if deliver:
            assert isinstance(e.message, Frames)
            self.take(e.message)

    def take(self, m: Frames) -> None:
        at = 0
        for i, stream in enumerate(m.stream):
            tokens = list(m.tokens[at : at + m.count[i]])
            at += m.count[i]
            have = self.got.setdefault(stream, [])
            assert stream not in self.end_seen, "a frame after the end"
            assert m.first[i] == len(have), "a gap or a repeat reached the owner"
            have += tokens
            if m.flags[i] & FLAG_END:
                self.end_seen.add(stream)

    def heard(self, m: Any) -> None:
        assert isinstance(m, Window)
        self.to_owner += self.sender.window(m, self.now)
        self.news()

    def news(self) -> None:
        self.settled += self.sender.settled()


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(stream_link, name, value)


def test_each_token_once_and_in_order() -> None:
    run_machine(StreamLink, settings=budget(60))


# ---- bugs planted on purpose


class AcksTooMuch(StreamSender):
    def window(self, message: Window, now: float) -> list[bytes]:
        return super().window(Window(message.acked + 1, message.size, message.resend), now)


class NeverResends(StreamSender):
    def window(self, message: Window, now: float) -> list[bytes]:
        return super().window(Window(message.acked, message.size, False), now)


class NeverProbes(StreamSender):
    def tick(self, now: float) -> list[bytes]:
        return []


class IgnoresTheWindow(StreamSender):
    def emit(self, emits: Any, now: float) -> list[bytes]:
        self._window = 1 << 30
        return super().emit(emits, now)


class ForgetsWhatWaits(StreamSender):
    def emit(self, emits: Any, now: float) -> list[bytes]:
        waiting, self._pending = self._pending, {}
        out = super().emit(emits, now)
        self._pending = {**waiting, **self._pending}
        return out


class TakesHoles(StreamReceiver):
    def accept(self, seq: int, size: int, now: float) -> tuple[bool, list[bytes]]:
        self._received = max(self._received, seq - 1)
        return super().accept(seq, size, now)


class TakesRepeats(StreamReceiver):
    def accept(self, seq: int, size: int, now: float) -> tuple[bool, list[bytes]]:
        deliver, answers = super().accept(seq, size, now)
        return deliver or seq == self._received, answers


SENDERS = [AcksTooMuch, NeverResends, NeverProbes, IgnoresTheWindow, ForgetsWhatWaits]


@pytest.mark.parametrize("broken", [*SENDERS, TakesHoles, TakesRepeats])
def test_it_finds_a_planted_bug(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    what = "make_sender" if broken in SENDERS else "make_receiver"
    monkeypatch.setattr(StreamLink, what, broken)
    with pytest.raises(AssertionError):
        run_machine(StreamLink, settings=hunt(300))
