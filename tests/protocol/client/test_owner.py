"""The owner against docs/wire.md: one test a rule, then random interleavings."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import columns
from protocol.client.owned_stream import OwnedStream
from protocol.client.owner import DEADLINE_GRACE_S, Ended, Event, Grew, Owner, Send
from protocol.client.stream_states import TRANSITIONS, Change, State, after
from protocol.errors import (
    ConductorLost,
    DeadlineExceeded,
    IllegalTransition,
    Overloaded,
    RequestFailed,
    WorkerLost,
)
from protocol.messages import FLAG_CLOSES, FLAG_END, Closed, End, Frames, History, Reason, Rebase
from protocol.stream_link import Emit, to_frames


def opened(owner: Owner, **kw: Any) -> OwnedStream:
    s = owner.open("m", {"tokens": b""}, {"max_tokens": 9}, 0.0, **kw)
    owner.submission(s, 0.0)
    return s


def frame(
    s: OwnedStream, first: int, tokens: Sequence[int], *, attempt: int = 1, flags: int = 0,
    reason: int = 0, extra: dict[str, Any] | None = None, channel: int = 0,
) -> Frames:  # fmt: skip
    return to_frames([Emit(s.id, attempt, channel, first, tokens, flags, reason, extra)])


def end(
    s: OwnedStream, reason: Reason, counts: list[int] | None = None, *, attempt: int = 1,
    detail: dict[str, Any] | None = None,
) -> End:  # fmt: skip
    return End(
        columns.u64([s.id]), columns.u16([attempt]), columns.u8([reason]), [counts or []],
        [detail or {}],
    )  # fmt: skip


def rebase(s: OwnedStream, attempt: int) -> Rebase:
    return Rebase(columns.u64([s.id]), columns.u16([attempt]))


def closed(events: list[Event]) -> list[tuple[int, int, Reason, int]]:
    rows: list[tuple[int, int, Reason, int]] = []
    for e in events:
        if isinstance(e, Send) and isinstance(e.message, Closed):
            assert e.keep
            m = e.message
            rows += zip(m.stream, m.attempt, map(Reason, m.reason), m.count, strict=True)
    return rows


# ---- the table


def test_the_table_is_the_one_of_the_document() -> None:
    o, e, c = State.OPEN, State.ENDING, State.CLOSED
    counted, rebased, terminal = Change.END_COUNTED, Change.REBASE, Change.TERMINAL
    assert {
        (o, counted): e, (o, rebased): o, (o, terminal): c,
        (e, counted): e, (e, rebased): o, (e, terminal): c,
        (c, counted): c, (c, rebased): c,
    } == TRANSITIONS  # fmt: skip


def test_a_second_terminal_event_is_the_one_impossible_thing() -> None:
    missing = [p for p in product(State, Change) if p not in TRANSITIONS]
    assert missing == [(State.CLOSED, Change.TERMINAL)]
    with pytest.raises(IllegalTransition, match=r"closed on terminal event.*\n.*the story") as e:
        after(State.CLOSED, Change.TERMINAL, "stream 0x1", ["the story"])
    assert "stream 0x1" in str(e.value)


# ---- rule 7: what is accepted


def test_tokens_are_accepted_at_the_position_that_is_next() -> None:
    owner = Owner()
    s = opened(owner)
    assert owner.frames(frame(s, 0, [5, 6])) == [Grew([s.id])]
    assert owner.frames(frame(s, 2, [7])) == [Grew([s.id])]
    assert list(s.tokens) == [5, 6, 7]


def test_one_message_carries_many_rows() -> None:
    owner = Owner()
    a, b = opened(owner), opened(owner)
    m = to_frames([Emit(a.id, 1, 0, 0, [1]), Emit(99, 1, 0, 0, [2, 2]), Emit(b.id, 1, 0, 0, [3])])
    assert owner.frames(m) == [Grew([a.id, b.id])]
    assert (list(a.tokens), list(b.tokens)) == ([1], [3])
    assert owner.statistics()["unknown_stream"] == 1


def test_a_steady_step_is_taken_as_its_rows_one_by_one_would_be() -> None:
    """Every way in which a row of a step of single tokens can be odd, among rows that are not."""
    whole, single = Owner(), Owner()
    for owner in (whole, single):
        a, repeat, diverged, gap, rebased, ending, b = (opened(owner) for _ in range(7))
        for s in (repeat, diverged):
            owner.frames(frame(s, 0, [4]))
        owner.rebase(rebase(rebased, 2))
        owner.end(end(ending, Reason.DONE, [1]))
        streams = (a, repeat, diverged, gap, rebased, ending, b)
    emits = [Emit(s.id, 1, 0, first, [4 + i]) for i, (s, first) in enumerate(
        [(a, 0), (repeat, 0), (diverged, 0), (gap, 3), (rebased, 0), (ending, 0), (b, 0)]
    )]  # fmt: skip
    emits[1].tokens = [4]
    emits.append(Emit(999, 1, 0, 0, [1]))
    events = whole.frames(to_frames(emits))
    alone = [e for emit in emits for e in single.frames(to_frames([emit]))]
    grown = [i for e in alone if isinstance(e, Grew) for i in e.streams]
    assert isinstance(events[0], Grew)
    assert sorted(events[0].streams) == sorted(grown) == [a.id, ending.id, b.id]
    ended = [e for e in alone if isinstance(e, Ended)]
    assert [(e.stream, e.reason) for e in events if isinstance(e, Ended)] == [
        (e.stream, e.reason) for e in ended
    ]
    assert [e.reason for e in ended] == [Reason.DIVERGED, Reason.FAILED, Reason.DONE]
    assert closed(events) == closed(alone)
    assert whole.statistics() == single.statistics()
    assert [list(s.tokens) for s in streams] == [[4], [4], [4], [], [], [9], [10]]


def test_repeats_are_dropped_and_only_the_new_part_is_taken() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5, 6, 7]))
    assert owner.frames(frame(s, 1, [6])) == []
    assert owner.frames(frame(s, 1, [6, 7, 8])) == [Grew([s.id])]
    assert list(s.tokens) == [5, 6, 7, 8]
    assert owner.statistics()["repeated"] == 3


def test_a_repeat_that_differs_closes_as_diverged() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5, 6]))
    events = owner.frames(frame(s, 1, [9, 7]))
    assert closed(events) == [(s.id, 1, Reason.DIVERGED, 2)]
    assert list(s.tokens) == [5, 6]
    assert isinstance(s.error, RequestFailed)


def test_a_gap_closes_as_failed_and_says_both_positions() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5]))
    events = owner.frames(frame(s, 3, [9]))
    assert closed(events) == [(s.id, 1, Reason.FAILED, 1)]
    assert str(s.error) == "tokens from position 3 arrived, 1 was next"


def test_an_empty_frame_beyond_the_end_is_a_gap_too() -> None:
    owner = Owner()
    s = opened(owner)
    events = owner.frames(frame(s, 1, [], flags=FLAG_END | FLAG_CLOSES, reason=Reason.STOP))
    assert closed(events) == [(s.id, 1, Reason.FAILED, 0)]


@pytest.mark.parametrize("attempt", [1, 3])
def test_other_attempts_are_dropped_and_counted(attempt: int) -> None:
    owner = Owner()
    s = opened(owner)
    owner.rebase(rebase(s, 2))
    assert owner.frames(frame(s, 0, [5], attempt=attempt)) == []
    assert owner.statistics()["other_attempt"] == 1
    assert owner.frames(frame(s, 0, [6], attempt=2))
    assert list(s.tokens) == [6]


def test_a_channel_that_this_owner_does_not_take_fails_the_stream() -> None:
    owner = Owner()
    s = opened(owner)
    assert closed(owner.frames(frame(s, 0, [5], channel=1))) == [(s.id, 1, Reason.FAILED, 0)]


def test_frames_after_the_end_are_dropped() -> None:
    owner = Owner()
    s = opened(owner)
    owner.cancel(s.id)
    assert owner.frames(frame(s, 0, [5])) == []
    assert list(s.tokens) == []


# ---- rules 8 and 11: ends


def test_a_closing_frame_ends_the_stream() -> None:
    owner = Owner()
    s = opened(owner)
    events = owner.frames(frame(s, 0, [5], flags=FLAG_END | FLAG_CLOSES, reason=Reason.LENGTH))
    assert events[:2] == [Grew([s.id]), Ended(s.id, Reason.LENGTH, None)]
    assert closed(events) == [(s.id, 1, Reason.LENGTH, 1)]
    assert owner.statistics()["open"] == 0


def test_an_end_of_the_channel_alone_does_not_close() -> None:
    owner = Owner()
    s = opened(owner)
    events = owner.frames(frame(s, 0, [5], flags=FLAG_END, reason=Reason.STOP))
    assert events == [Grew([s.id])]
    assert s.state is State.OPEN


def test_a_history_that_already_meets_its_stop_ends_with_an_empty_frame() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5, 6]))
    owner.rebase(rebase(s, 2))
    events = owner.frames(
        frame(s, 2, [], attempt=2, flags=FLAG_END | FLAG_CLOSES, reason=Reason.STOP)
    )
    assert closed(events) == [(s.id, 2, Reason.STOP, 2)]


def test_a_closing_frame_that_ends_before_what_was_delivered_is_a_contradiction() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5, 6]))
    events = owner.frames(frame(s, 0, [5], flags=FLAG_CLOSES, reason=Reason.STOP))
    assert closed(events) == [(s.id, 1, Reason.DIVERGED, 2)]


@pytest.mark.parametrize("reason", [0, 200])
def test_a_closing_frame_without_a_valid_reason_fails(reason: int) -> None:
    owner = Owner()
    s = opened(owner)
    events = owner.frames(frame(s, 0, [5], flags=FLAG_CLOSES, reason=reason))
    assert closed(events) == [(s.id, 1, Reason.FAILED, 1)]


def test_end_with_counts_waits_for_the_tail() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5]))
    assert owner.end(end(s, Reason.DONE, [3])) == []
    assert s.state is State.ENDING
    assert owner.frames(frame(s, 1, [6])) == [Grew([s.id])]
    assert closed(owner.frames(frame(s, 2, [7]))) == [(s.id, 1, Reason.DONE, 3)]


def test_end_with_counts_already_reached_closes_at_once() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5]))
    assert closed(owner.end(end(s, Reason.DONE, [1]))) == [(s.id, 1, Reason.DONE, 1)]


def test_end_without_counts_closes_at_once_with_the_error_it_brings() -> None:
    owner = Owner()
    s = opened(owner)
    detail = Overloaded("queue is full", retry_after=2).to_wire()
    events = owner.end(end(s, Reason.REJECTED, detail=detail))
    assert closed(events) == [(s.id, 1, Reason.REJECTED, 0)]
    assert isinstance(s.error, Overloaded)
    assert s.error.detail == {"retry_after": 2}


def test_an_end_without_detail_takes_the_error_of_the_failing_frame() -> None:
    owner = Owner()
    s = opened(owner)
    extra = {"error": RequestFailed("NaN in row 3").to_wire()}
    owner.frames(frame(s, 0, [], flags=FLAG_END, reason=Reason.FAILED, extra=extra))
    assert s.state is State.OPEN
    owner.end(end(s, Reason.FAILED))
    assert str(s.error) == "NaN in row 3"


def test_a_success_has_no_error() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [], extra={"error": RequestFailed("x").to_wire()}))
    owner.end(end(s, Reason.STOP))
    assert (s.reason, s.error) == (Reason.STOP, None)


@pytest.mark.parametrize("counts", [[1], [3, 1]])
def test_an_end_that_contradicts_the_history_fails(counts: list[int]) -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5, 6]))
    assert closed(owner.end(end(s, Reason.DONE, counts))) == [(s.id, 1, Reason.FAILED, 2)]


def test_tokens_past_the_announced_end_are_never_delivered() -> None:
    owner = Owner()
    s = opened(owner)
    owner.end(end(s, Reason.DONE, [1]))
    assert closed(owner.frames(frame(s, 0, [5, 6]))) == [(s.id, 1, Reason.FAILED, 0)]


def test_an_end_of_an_older_attempt_is_dropped() -> None:
    owner = Owner()
    s = opened(owner)
    owner.rebase(rebase(s, 2))
    assert owner.end(end(s, Reason.FAILED, attempt=1)) == []
    assert owner.end(end(s, Reason.DONE, [0], attempt=1)) == []
    assert s.state is State.OPEN
    assert owner.statistics()["stale"] == 2


@pytest.mark.parametrize("detail", [{"code": "failed", "self": 1}, {"message": [1]}, {3: 4}])
def test_a_strange_error_detail_still_ends_the_stream(detail: dict[Any, Any]) -> None:
    owner = Owner()
    s = opened(owner)
    assert closed(owner.end(end(s, Reason.FAILED, detail=detail))) == [(s.id, 1, Reason.FAILED, 0)]


# ---- rule 9: rebase


def test_rebase_answers_with_the_history_in_one_act() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5, 6]))
    owner.end(end(s, Reason.DONE, [4]))
    (answer,) = owner.rebase(rebase(s, 2))
    history = History(s.id, 2, columns.u32([2]), columns.u32([5, 6]))
    assert answer == Send(history)
    assert (s.state, s.attempt) == (State.OPEN, 2)
    # the forgotten end no longer bounds the stream
    owner.frames(frame(s, 2, [7, 8, 9], attempt=2))
    assert list(s.tokens) == [5, 6, 7, 8, 9]
    # and what was answered does not change with the stream
    assert answer == Send(history)


def test_rebase_is_answered_again_but_never_backwards() -> None:
    owner = Owner()
    s = opened(owner)
    assert owner.rebase(rebase(s, 2)) == owner.rebase(rebase(s, 2))
    assert owner.rebase(rebase(s, 1)) == []
    assert s.attempt == 2


def test_a_closed_stream_ignores_rebase_and_end() -> None:
    owner = Owner()
    s = opened(owner)
    owner.cancel(s.id)
    assert owner.rebase(rebase(s, 2)) == []
    assert owner.end(end(s, Reason.FAILED)) == []
    assert owner.cancel(s.id) == []
    assert owner.close_all(Reason.ABORTED) == []
    assert s.reason is Reason.CANCELLED


# ---- rule 20, local ends, deadlines


def test_inventory_and_submissions_carry_the_current_attempt_and_count() -> None:
    owner = Owner()
    a, b = opened(owner), opened(owner)
    new = owner.open("m", {}, {}, 0.0)
    owner.frames(frame(a, 0, [5, 6]))
    owner.rebase(rebase(a, 2))
    owner.cancel(b.id)
    assert owner.inventory() == {"streams": [[a.id, 2, 2]]}
    again = [s.message for s in owner.submissions(1.0)]
    assert [(m.stream, m.attempt) for m in again] == [(a.id, 2), (new.id, 1)]  # type: ignore[attr-defined]
    assert owner.inventory() == {"streams": [[a.id, 2, 2], [new.id, 1, 0]]}


def test_a_stream_that_was_never_submitted_ends_without_a_message() -> None:
    owner = Owner()
    s = owner.open("m", {}, {}, 0.0)
    assert owner.cancel(s.id) == [Ended(s.id, Reason.CANCELLED, None)]


def test_a_local_cancel_closes_with_the_count() -> None:
    owner = Owner()
    s = opened(owner)
    owner.frames(frame(s, 0, [5, 6]))
    assert closed(owner.cancel(s.id, Reason.STOP)) == [(s.id, 1, Reason.STOP, 2)]


def test_close_all_is_one_message() -> None:
    owner = Owner()
    a, b = opened(owner), opened(owner)
    events = owner.close_all(Reason.CONDUCTOR_LOST)
    assert len([e for e in events if isinstance(e, Send)]) == 1
    assert [c[0] for c in closed(events)] == [a.id, b.id]
    assert isinstance(a.error, ConductorLost)


def test_the_owner_keeps_the_deadline_itself() -> None:
    owner = Owner()
    s = opened(owner, deadline_ms=1000)
    late = opened(owner, deadline_ms=5000)
    opened(owner)
    due = owner.due()
    assert due == pytest.approx(1.0 + DEADLINE_GRACE_S)
    assert owner.tick(1.0) == []
    assert closed(owner.tick(1.0 + DEADLINE_GRACE_S)) == [(s.id, 1, Reason.DEADLINE, 0)]
    assert isinstance(s.error, DeadlineExceeded)
    owner.cancel(late.id)
    assert owner.due() is None
    assert owner.tick(99.0) == []


def test_a_new_session_is_told_what_is_left_of_the_deadline() -> None:
    owner = Owner()
    s = opened(owner, deadline_ms=1000)
    assert owner.submission(s, 0.4).message.deadline_ms == 600  # type: ignore[attr-defined]
    assert owner.submission(s, 1.02).message.deadline_ms == 1  # type: ignore[attr-defined]


def test_deadlines_of_closed_streams_do_not_pile_up() -> None:
    owner = Owner()
    for _ in range(1000):
        owner.cancel(opened(owner, deadline_ms=3_600_000).id)
    assert owner.statistics()["deadlines"] < 100


def test_opened_is_open_plus_closed_by_reason() -> None:
    owner = Owner()
    streams = [opened(owner) for _ in range(5)]
    owner.cancel(streams[0].id)
    owner.end(end(streams[1], Reason.WORKER_LOST))
    owner.end(end(streams[2], Reason.DONE, [0]))
    stats = owner.statistics()
    assert (stats["opened"], stats["open"]) == (5, 2)
    assert (stats["closed_cancelled"], stats["closed_worker_lost"], stats["closed_done"]) == (
        1,
    ) * 3
    assert isinstance(streams[1].error, WorkerLost)


# ---- everything at once


def token_at(position: int) -> int:
    return 1000 + position * 7


@st.composite
def lives(draw: st.DrawFn) -> tuple[int, list[tuple[str, Any]]]:
    """A legal life of one stream: two attempts' frames, with repeats, in any interleaving.

    Each attempt's frames keep their order (a link is FIFO); the control link's messages keep
    theirs; nothing orders the two. Attempt 2 starts from the history at the rebase.
    """
    total = draw(st.integers(1, 8))
    control = draw(
        st.sampled_from([["rebase"], ["rebase", "end"], ["end", "rebase"], ["end"], ["fail"], []])
    )
    cuts = sorted(draw(st.sets(st.integers(1, total), max_size=4)) | {total})
    steps: list[tuple[str, Any]] = [("control", c) for c in control]
    chunks: list[tuple[str, Any]] = []
    at = 0
    for cut in cuts:
        overlap = draw(st.integers(0, at))
        chunks.append(("old", (at - overlap, cut)))
        at = cut
    order = draw(st.permutations(["c"] * len(steps) + ["o"] * len(chunks) + ["n"] * 4))
    queues = {"c": steps, "o": chunks, "n": [("new", None)] * 4}
    cursors = dict.fromkeys(queues, 0)
    out: list[tuple[str, Any]] = []
    for q in order:
        out.append(queues[q][cursors[q]])
        cursors[q] += 1
    return total, out


@given(lives(), st.booleans(), st.integers(0, 30))
@settings(max_examples=500, deadline=None)
def test_any_interleaving_gives_one_terminal_event_and_a_gapless_history(
    life: tuple[int, list[tuple[str, Any]]], worker_closes: bool, cancel_at: int
) -> None:
    total, script = life
    owner = Owner()
    s = opened(owner)
    delivered: list[int] = []
    ends: list[Reason] = []
    told: list[tuple[int, int, Reason, int]] = []

    def absorb(events: list[Event]) -> None:
        for e in events:
            if isinstance(e, Grew):
                assert not ends, "a token after the terminal event"
                assert e.streams == [s.id]
                delivered.extend(s.tokens[len(delivered) :])
            elif isinstance(e, Ended):
                ends.append(e.reason)
        told.extend(closed(events))

    def attempt_frame(attempt: int, first: int, last: int) -> Frames:
        closes = worker_closes and last == total
        flags, reason = (FLAG_END | FLAG_CLOSES, Reason.STOP) if closes else (0, 0)
        tokens = [token_at(p) for p in range(first, last)]
        return frame(s, first, tokens, attempt=attempt, flags=flags, reason=reason)

    new_at: int | None = None  # where attempt 2 goes on, once the history was answered
    for i, (who, what) in enumerate(script):
        if i == cancel_at:
            absorb(owner.cancel(s.id))
        if who == "old":
            absorb(owner.frames(attempt_frame(1, *what)))
        elif who == "new" and new_at is not None and new_at <= total:
            last = min(total, new_at + 3)
            absorb(owner.frames(attempt_frame(2, new_at, last)))
            new_at = last if last < total else total + 1
        elif what == "rebase":
            for e in (events := owner.rebase(rebase(s, 2))):
                assert isinstance(e, Send)
                assert isinstance(e.message, History)
                assert list(e.message.tokens) == delivered
                new_at = len(e.message.tokens)
            absorb(events)
        elif what == "end":
            absorb(owner.end(end(s, Reason.DONE, [total], attempt=s.attempt)))
        elif what == "fail":
            absorb(owner.end(end(s, Reason.FAILED, attempt=s.attempt)))
    if new_at is not None and new_at <= total:
        absorb(owner.frames(attempt_frame(2, new_at, total)))
    absorb(owner.close_all(Reason.ABORTED))
    assert len(ends) == 1
    assert told == [(s.id, s.attempt, ends[0], len(delivered))]
    assert delivered == [token_at(p) for p in range(len(delivered))]
    assert list(s.tokens) == delivered
    assert ends[0] not in (Reason.DIVERGED,)
    if ends[0].success:
        assert len(delivered) == total


@given(st.data())
@settings(max_examples=300, deadline=None)
def test_hostile_frames_never_raise_and_never_break_the_books(data: st.DataObject) -> None:
    owner = Owner()
    streams = [opened(owner, deadline_ms=5) for _ in range(2)]
    small = st.integers(0, 4)
    for _ in range(data.draw(st.integers(0, 12))):
        s = data.draw(st.sampled_from(streams))
        attempt = data.draw(st.integers(0, 3))
        kind = data.draw(small)
        if kind == 0:
            counts = data.draw(st.lists(small, max_size=2))
            owner.end(end(s, Reason(0), counts, attempt=attempt))
        elif kind == 1:
            owner.rebase(rebase(s, attempt))
        else:
            owner.frames(
                frame(
                    s, data.draw(small), data.draw(st.lists(small, max_size=3)), attempt=attempt,
                    flags=data.draw(st.integers(0, 255)), reason=data.draw(st.integers(0, 255)),
                    channel=data.draw(st.integers(0, 1)), extra={"error": data.draw(small)},
                )
            )  # fmt: skip
        stats = owner.statistics()
        by_reason = sum(n for k, n in stats.items() if k.startswith("closed_"))
        assert stats["opened"] == stats["open"] + by_reason
    owner.tick(1.0)
    assert owner.statistics()["open"] == 0
