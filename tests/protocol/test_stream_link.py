"""The stream link: nothing lost, nothing twice, whatever the network does to frames."""

import random
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import columns, stream_link
from protocol.codec import decode
from protocol.messages import FLAG_CLOSES, FLAG_END, Frames, Window
from protocol.stream_link import Emit, Plain, StreamReceiver, StreamSender, to_frames


@dataclass
class Pair:
    """A sender and a receiver with a network between them that may lose frames."""

    seed: int = 0
    loss: float = 0.0
    now: float = 0.0
    got: dict[int, list[int]] = field(default_factory=dict)
    flags: dict[int, int] = field(default_factory=dict)
    frames: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.sender = StreamSender(11, 22)
        self.receiver = StreamReceiver(11, 22)

    def to_owner(self, sent: list[bytes]) -> None:
        for data in sent:
            if self.rng.random() < self.loss:
                continue
            e = decode(data)
            assert (e.a, e.b) == (11, 22)
            deliver, back = self.receiver.accept(e.c, len(data), self.now)
            if deliver:
                self.take(e.message)
            self.to_worker(back)

    def take(self, message: object) -> None:
        assert isinstance(message, Frames)
        self.frames += 1
        at = 0
        for i, stream in enumerate(message.stream):
            tokens = list(message.tokens[at : at + message.count[i]])
            at += message.count[i]
            have = self.got.setdefault(stream, [])
            assert message.first[i] == len(have), "a hole or a repeat reached the owner"
            have += tokens
            self.flags[stream] = self.flags.get(stream, 0) | message.flags[i]

    def to_worker(self, sent: list[bytes]) -> None:
        for data in sent:
            if self.rng.random() < self.loss:
                continue
            message = decode(data).message
            assert isinstance(message, Window)
            self.to_owner(self.sender.window(message, self.now))

    def rest(self) -> None:
        """Let time pass until nothing is unacknowledged."""
        for _ in range(400):
            self.now += 0.25
            self.to_owner(self.sender.tick(self.now))
            self.to_worker(self.receiver.tick(self.now))
            if self.sender.idle:
                return
        raise AssertionError(f"never at rest: {self.sender.statistics()}")


def emit(stream: int, first: int, n: int = 1, flags: int = 0) -> Emit:
    return Emit(stream, 1, 0, first, list(range(first, first + n)), flags, 1 if flags else 0)


def test_one_step_is_one_frame_whatever_its_rows() -> None:
    p = Pair()
    for step in range(10):
        sent = p.sender.emit([emit(s, step) for s in range(64)], p.now)
        assert len(sent) == 1
        p.to_owner(sent)
    assert p.frames == 10
    assert all(t == list(range(10)) for t in p.got.values())


@given(st.integers(0, 2**32), st.floats(0, 0.4))
@settings(max_examples=60, deadline=None)
def test_losses_heal(seed: int, loss: float) -> None:
    p = Pair(seed=seed, loss=loss)
    for step in range(60):
        p.now += 0.01
        last = FLAG_END | FLAG_CLOSES if step == 59 else 0
        p.to_owner(p.sender.emit([emit(s, step, flags=last) for s in range(3)], p.now))
    p.rest()
    assert p.got == {s: list(range(60)) for s in range(3)}
    assert set(p.flags.values()) == {FLAG_END | FLAG_CLOSES}
    assert sorted(p.sender.settled()) == [0, 1, 2]
    assert p.sender.settled() == []


def test_a_lost_tail_shows_after_half_a_second() -> None:
    p = Pair()
    p.to_owner(p.sender.emit([emit(1, 0)], p.now))
    p.sender.emit([emit(1, 1)], p.now)  # lost
    p.now = 0.4
    assert p.sender.tick(p.now) == []
    p.now = 0.6
    p.to_owner(p.sender.tick(p.now))
    assert p.got[1] == [0, 1]


def test_beyond_the_window_tokens_coalesce_per_row() -> None:
    p = Pair()
    unread: list[bytes] = []
    steps = 0
    while not p.sender.statistics()["pending_bytes"]:
        unread += p.sender.emit([emit(s, steps) for s in range(8)], p.now)
        steps += 1
    assert p.sender.statistics()["in_flight_bytes"] >= stream_link.WINDOW_BYTES
    for _ in range(1000):
        assert p.sender.emit([emit(s, steps) for s in range(8)], p.now) == []
        steps += 1
    before = len(unread)
    p.to_owner(unread)
    p.rest()
    assert p.got == {s: list(range(steps)) for s in range(8)}
    assert p.frames - before < 20  # a thousand steps became a few frames


def test_a_stalled_owner_is_held_then_failed_and_recovers() -> None:
    p = Pair()
    unread: list[bytes] = []
    n = 0
    while not p.sender.must_hold:
        unread += p.sender.emit([emit(1, n, n=50_000)], p.now)
        n += 50_000
    pending = p.sender.statistics()["pending_bytes"]
    assert stream_link.HOLD_BYTES < pending < stream_link.HOLD_BYTES + 300_000
    assert not p.sender.must_fail(p.now + 9.9)
    assert p.sender.must_fail(p.now + 10.0)
    p.to_owner(unread)
    p.rest()
    assert not p.sender.must_hold
    assert p.got[1] == list(range(n))


def test_an_acknowledgement_costs_one_message_for_many_frames() -> None:
    p = Pair()
    back = 0
    for step in range(320):
        for data in p.sender.emit([emit(1, step)], p.now):
            _, windows = p.receiver.accept(decode(data).c, len(data), p.now)
            back += len(windows)
            for w in windows:
                message = decode(w).message
                assert isinstance(message, Window)
                p.sender.window(message, p.now)
    assert back == 320 // stream_link.ACK_EVERY
    assert p.sender.idle


def test_a_new_attempt_replaces_what_waits_of_the_old_one() -> None:
    p = Pair()
    unread: list[bytes] = []
    n = 0
    while not p.sender.statistics()["pending_bytes"]:
        unread += p.sender.emit([emit(1, n, n=1000)], p.now)
        n += 1000
    p.sender.emit([Emit(1, 2, 0, 5, [7])], p.now)
    for data in unread:
        e = decode(data)
        assert p.receiver.accept(e.c, len(data), p.now)[0]
    (window,) = p.receiver.tick(p.now) or [b""]
    message = decode(window).message
    assert isinstance(message, Window)
    (frame,) = p.sender.window(message, p.now)
    frames = decode(frame).message
    assert isinstance(frames, Frames)
    assert list(frames.attempt) == [2]
    assert list(frames.tokens) == [7]


ROWS = st.lists(
    st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32 - 1), st.booleans()),
    max_size=12, unique_by=lambda r: r[0],
)  # fmt: skip


@given(ROWS)
def test_plain_columns_say_what_their_rows_would_say_one_by_one(
    rows: list[tuple[int, int, bool]],
) -> None:
    plain = columns_of([(s, t) for s, t, odd in rows if not odd])
    odd = [Emit(s, 3, 0, 7, (t,), FLAG_END, 2, {"error": {}}) for s, t, odd in rows if odd]
    assert to_frames(odd, plain) == to_frames([*plain.emits(), *odd])
    one_frame = StreamSender(1, 2).emit(odd, 0.0, plain)
    assert len(one_frame) == bool(rows)
    assert one_frame == StreamSender(1, 2).emit([*plain.emits(), *odd], 0.0)


def columns_of(rows: list[tuple[int, int]], first: int = 7) -> Plain:
    n = len(rows)
    return Plain(
        columns.u64(s for s, _ in rows), columns.u16([3] * n), columns.u32([first] * n),
        columns.u32(t for _, t in rows),
    )  # fmt: skip


def test_plain_columns_coalesce_beyond_the_window_as_rows_do() -> None:
    p = Pair()
    unread: list[bytes] = []
    steps = 0
    while not p.sender.statistics()["pending_bytes"]:
        unread += p.sender.emit([], p.now, columns_of([(s, steps) for s in range(8)], steps))
        steps += 1
    for _ in range(50):
        assert p.sender.emit([], p.now, columns_of([(s, steps) for s in range(8)], steps)) == []
        steps += 1
    p.to_owner(unread)
    p.rest()
    assert p.got == {s: list(range(steps)) for s in range(8)}
