"""The sequences of docs/wire.md that concern the conductor, as lists of commands."""

import pytest

from conductor.core.commands import Drained, Forget, Send
from conductor.core.events import Drain
from protocol import columns
from protocol.messages import (
    ROW_MAY_CLOSE,
    Bye,
    End,
    Exit,
    Kind,
    Leave,
    Leaving,
    Open,
    Owners,
    Reason,
    Rebase,
    Refuse,
    Row,
    Run,
    Submit,
)
from tests.support.conductor_driver import LIFE, Driver, config, leave, rows, sent, tokens


def end(stream: int, attempt: int, reason: Reason, counts: list[int], detail: dict) -> End:
    return End(
        columns.u64([stream]), columns.u16([attempt]), columns.u8([reason]), [counts], [detail]
    )


def rebase(stream: int, attempt: int) -> Rebase:
    return Rebase(columns.u64([stream]), columns.u16([attempt]))


class World(Driver):
    """One worker, one owner, one running request: stream 5."""

    def __init__(self, **submit: object) -> None:
        super().__init__()
        self.w, self.o = self.worker(), self.owner()
        self.first = self.submit(self.o, 5, **submit)
        (self.row,) = rows(self.first)

    def at_rest(self) -> None:
        assert self.requests["open"] == 0
        assert self.snapshot["workers"][0]["rows"] == 0
        assert self.snapshot["workers"][0]["committed_pages"] == 0


def test_plain_opens_the_standing_batch_and_sends_the_whole_path() -> None:
    d = World(params={"max_tokens": 8, "seed": 3, "temperature": 0.5})
    row = Row(
        row=(LIFE << 32) + 1,
        owner=d.o,
        stream=5,
        attempt=1,
        ordinal=0,
        path=[[1, 4], [2, 0]],
        base=[0],
        handed=[],
        inputs={"tokens": tokens([1, 2, 3, 4])},
        params={"max_tokens": 8, "seed": 3, "temperature": 0.5},
        max_steps=8,
        flags=ROW_MAY_CLOSE,
        outputs=["tokens"],
    )
    assert d.first == [
        Send(d.w, Open(2, "m/decoder", "decode", 0, 256)),
        Send(d.w, Run(1, "m/decoder", "prefill", 0, [row])),
    ]


@pytest.mark.parametrize("closed_first", [False, True])
def test_plain_closed_and_finished_come_in_either_order(closed_first: bool) -> None:
    d = World()
    assert d.report(d.w, d.row.row, Kind.MOVED, 1) == []
    if closed_first:
        # Closed can't tell a closing frame from a stop string of the owner: the row is let go
        assert d.closed(d.o, 5, reason=Reason.LENGTH) == [Send(d.w, leave(d.row.row))]
    finished = d.report(d.w, d.row.row, Kind.FINISHED, 8, reason=Reason.LENGTH, closed=True)
    assert finished == []
    if not closed_first:
        assert d.closed(d.o, 5, reason=Reason.LENGTH) == []
    d.at_rest()
    assert d.requests["closed"] == {"length": 1}


def test_done_without_a_closing_frame_is_ended_by_counts() -> None:
    d = World()
    out = d.report(d.w, d.row.row, Kind.FINISHED, 8, reason=Reason.LENGTH)
    assert out == [Send(d.o, end(5, 1, Reason.LENGTH, [8], {}))]
    assert d.closed(d.o, 5, reason=Reason.LENGTH) == []
    d.at_rest()


def test_done_is_the_reason_where_the_worker_gives_none() -> None:
    d = World()
    out = d.report(d.w, d.row.row, Kind.FINISHED, 3, next={"done": True}, facts={})
    assert out == [Send(d.o, end(5, 1, Reason.DONE, [3], {}))]


def test_a_walk_that_nothing_drives_fails_the_request() -> None:
    d = World()
    (told,) = sent(d.report(d.w, d.row.row, Kind.FINISHED, 3, next={"walk": "vocode"}), End)
    assert list(told.reason) == [Reason.FAILED]
    assert "'vocode'" in told.detail[0]["message"]


def test_leave_crosses_finish() -> None:
    d = World()
    assert d.closed(d.o, 5, reason=Reason.CANCELLED) == [Send(d.w, leave(d.row.row))]
    assert d.snapshot["workers"][0]["rows"] == 1  # it holds its pages until its end is reported
    assert d.report(d.w, d.row.row, Kind.FINISHED, 8, reason=Reason.LENGTH, closed=True) == []
    d.at_rest()
    assert d.requests["closed"] == {"cancelled": 1}


@pytest.mark.parametrize("kind", [Kind.LEFT, Kind.FINISHED, Kind.FAILED, Kind.REFUSED])
def test_cancel_any_end_frees_the_row(kind: Kind) -> None:
    d = World()
    d.closed(d.o, 5, reason=Reason.CANCELLED)
    assert d.report(d.w, d.row.row, kind, 2) == []
    d.at_rest()


@pytest.mark.parametrize(
    ("named", "counted"), [(Reason.LENGTH, "length"), (Reason.DEADLINE, "deadline")]
)
def test_deadline_crosses_finish_and_closed_names_what_was_read_first(
    named: Reason, counted: str
) -> None:
    d = World(deadline_ms=100)
    d.now += 0.1
    out = d.tick()
    (told,) = sent(out, End)
    assert (list(told.reason), told.counts) == ([Reason.DEADLINE], [[]])
    assert told.detail[0]["code"] == "deadline"
    assert sent(out, Leave) == [leave(d.row.row)]
    assert d.report(d.w, d.row.row, Kind.FINISHED, 8, reason=Reason.LENGTH, closed=True) == []
    d.closed(d.o, 5, reason=named)
    d.at_rest()
    assert d.requests["closed"] == {counted: 1}


def test_death_rebases_and_the_history_goes_into_the_next_row() -> None:
    d = World()
    d.report(d.w, d.row.row, Kind.MOVED, 1)
    assert d.exited(d.w, outside=True) == [Forget(d.w), Send(d.o, rebase(5, 2))]
    w2 = d.worker()
    out = d.history(d.o, 5, 2, [70, 71, 72])
    (again,) = rows(out, w2)
    assert again.row != d.row.row
    assert (again.attempt, again.base, again.max_steps) == (2, [3], 5)
    assert again.path == [[3, 7], [4, 0]]
    assert again.inputs == {"tokens": tokens([1, 2, 3, 4, 70, 71, 72])}
    assert d.counters["replayed"] == 1


def test_death_of_a_worker_while_the_answer_is_on_its_way_finds_no_second_rebase() -> None:
    d = World()
    w2 = d.worker("w1")
    d.exited(d.w, outside=True)
    assert sent(d.exited(w2, outside=True), Rebase) == []


def test_a_late_or_wrong_history_is_dropped() -> None:
    d = World()
    assert d.history(d.o, 5, 1, []) == []
    d.exited(d.w, outside=True)
    d.worker()
    assert d.history(d.o, 5, 1, []) == []
    assert d.history(d.o, 6, 2, []) == []
    assert rows(d.history(d.o, 5, 2, []))
    assert d.history(d.o, 5, 2, []) == []
    assert d.counters["dropped_messages"] == 4


@pytest.mark.parametrize(("closes", "acked"), [(True, 8), (False, 7)])
def test_finished_known_tail_lost_is_replayed(closes: bool, acked: int) -> None:
    """Tokens that arrived don't prove that a closing frame did: it may be an empty one."""
    d = World()
    d.report(d.w, d.row.row, Kind.FINISHED, 8, acked, reason=Reason.LENGTH, closed=closes)
    assert sent(d.exited(d.w, outside=False), Rebase) == [rebase(5, 2)]
    d.worker()
    (again,) = rows(d.history(d.o, 5, 2, range(6)))
    assert again.max_steps == 2
    assert again.flags == ROW_MAY_CLOSE  # its row was over: nobody's suspect


def test_a_history_that_is_complete_is_placed_to_be_closed_by_the_worker() -> None:
    d = World()
    d.exited(d.w, outside=True)
    d.worker()
    (again,) = rows(d.history(d.o, 5, 2, range(8)))
    assert (again.base, again.max_steps) == ([8], 0)


def test_settled_is_not_rebased() -> None:
    d = World()
    d.report(d.w, d.row.row, Kind.FINISHED, 8, reason=Reason.LENGTH, closed=True)
    d.report(d.w, d.row.row, Kind.SETTLED)
    assert d.exited(d.w, outside=True) == [Forget(d.w)]
    d.closed(d.o, 5, reason=Reason.LENGTH)
    assert d.requests["closed"] == {"length": 1}


def test_all_tokens_acknowledged_settle_a_row_that_the_conductor_ends() -> None:
    d = World()
    d.report(d.w, d.row.row, Kind.FINISHED, 8, acked=8, reason=Reason.LENGTH)
    assert d.exited(d.w, outside=True) == [Forget(d.w)]


def test_a_failing_end_is_not_rebased() -> None:
    d = World(deadline_ms=100)
    d.now += 0.2
    d.tick()
    assert d.exited(d.w, outside=True) == [Forget(d.w)]


def test_join_void_the_row_that_failed_in_prefill_never_enters_decode() -> None:
    d = World()
    error = {"code": "failed", "message": "prepare_inputs raised"}
    out = d.report(d.w, d.row.row, Kind.FAILED, 0, error=error)
    assert out == [Send(d.o, end(5, 1, Reason.FAILED, [], error))]
    d.closed(d.o, 5, reason=Reason.FAILED)
    d.at_rest()


def test_refused_without_a_reason_says_so() -> None:
    d = World()
    (told,) = sent(d.report(d.w, d.row.row, Kind.REFUSED), End)
    assert "refused" in told.detail[0]["message"]


def test_a_failure_cannot_pass_for_a_success() -> None:
    d = World()
    (told,) = sent(d.report(d.w, d.row.row, Kind.FAILED, reason=Reason.STOP), End)
    assert list(told.reason) == [Reason.FAILED]


def test_preempted_and_left_unasked_are_rebased() -> None:
    for kind in (Kind.PREEMPTED, Kind.LEFT):
        d = World()
        assert d.report(d.w, d.row.row, kind, 2) == [Send(d.o, rebase(5, 2))]
        assert rows(d.history(d.o, 5, 2, [9, 9]))[0].base == [2]


def test_preemptions_of_a_request_are_bounded() -> None:
    d = World()
    row = d.row.row
    for attempt in range(2, 18):
        d.report(d.w, row, Kind.PREEMPTED)
        row = rows(d.history(d.o, 5, attempt, []))[0].row
    (told,) = sent(d.report(d.w, row, Kind.PREEMPTED), End)
    assert list(told.reason) == [Reason.FAILED]


@pytest.mark.parametrize(("replay", "base", "n"), [("history", [2], 6), ("restart", [0], 4)])
def test_replay_modes_place_differently(replay: str, base: list[int], n: int) -> None:
    d = World(replay=replay)
    d.exited(d.w, outside=True)
    d.worker()
    (again,) = rows(d.history(d.o, 5, 2, [70, 71]))
    assert again.base == base
    assert len(again.inputs["tokens"]) == 4 * n
    assert again.max_steps == 8 - base[0]


def test_replay_never_ends_worker_lost() -> None:
    d = World(replay="never")
    (told,) = sent(d.exited(d.w, outside=True), End)
    assert list(told.reason) == [Reason.WORKER_LOST]
    assert told.detail[0]["retryable"] is True


def test_after_four_replays_the_request_is_given_up() -> None:
    d = World()
    w = d.w
    for attempt in range(2, 6):
        assert sent(d.exited(w, outside=True), Rebase) == [rebase(5, attempt)]
        w = d.worker()
        d.history(d.o, 5, attempt, [])
    (told,) = sent(d.exited(w, outside=True), End)
    assert list(told.reason) == [Reason.WORKER_LOST]
    assert told.detail[0]["replays"] == 4


def test_drain_of_a_worker_moves_its_rows_at_the_end_of_grace() -> None:
    d = World()
    assert d.said(d.w, Leaving(1000)) == []
    assert d.submit(d.o, 6) == []  # no placements
    assert d.wait(0.9, d.w, d.o) == []
    w2 = d.worker("w1")
    assert [r.stream for r in rows(d.last, w2)] == [6]
    due = d.machine.next_due()
    assert due is not None
    out = d.wait(0.2, d.w, w2, d.o)
    assert d.machine.next_due() > due  # nothing is asked for over and over
    assert out == [Send(d.w, leave(d.row.row)), Send(d.o, rebase(5, 2))]
    assert [r.stream for r in rows(d.history(d.o, 5, 2, [8]), w2)] == [5]
    d.report(d.w, d.row.row, Kind.LEFT, 1)
    assert d.wait(0.2, d.w, w2, d.o) == [Send(d.w, Exit(0))]
    assert d.said(d.w, Bye("drained")) == [Forget(d.w)]
    assert d.counters["workers_lost"] == 0


def test_a_drained_worker_may_go_as_soon_as_nothing_is_left() -> None:
    d = World()
    d.said(d.w, Leaving(60_000))
    d.report(d.w, d.row.row, Kind.FINISHED, 8, reason=Reason.LENGTH, closed=True)
    assert d.wait(0.2, d.w, d.o) == []  # its last frames are not acknowledged yet
    d.closed(d.o, 5)
    assert d.wait(0.2, d.w, d.o) == [Send(d.w, Exit(0))]
    assert d.wait(1.0, d.w, d.o) == []  # said once


def test_owner_lost_leaves_rows_before_the_link_goes_down() -> None:
    d = World()
    d.submit(d.o, 6)
    out = d.said(d.o, Bye("closing"))
    (left,) = sent(out, Leave, d.w)
    assert len(left.row) == 2
    assert out == [
        Forget(d.o, owner_lost=True),
        Send(d.w, left),
        Send(d.w, Owners(d.o, "ipc://gw", False)),
    ]
    assert d.requests["closed"] == {"owner_lost": 2}


def test_fenced_a_lost_life_is_never_taken_back() -> None:
    d = World()
    d.exited(d.w)
    d.worker(life=d.w)
    (refused,) = sent(d.last, Refuse)
    assert refused.code == "fenced"
    assert Forget(d.w) in d.last
    d.exited(0x999)  # it died before its Hello was read
    d.worker("w9", life=0x999)
    assert sent(d.last, Refuse)[0].code == "fenced"


def test_a_lost_owner_is_never_taken_back() -> None:
    """Its streams are counted as owner_lost: taken back, they would end a second time."""
    d = World()
    d.said(d.o, Bye("closing"))
    d.owner(life=d.o)
    (refused,) = sent(d.last, Refuse)
    assert refused.code == "fenced"
    assert Forget(d.o) in d.last
    assert d.requests["closed"] == {"owner_lost": 1}


def test_drain_lets_streams_finish_then_is_drained_once() -> None:
    d = World()
    assert d.event(Drain(10_000)) == []
    d.report(d.w, d.row.row, Kind.FINISHED, 8, reason=Reason.LENGTH, closed=True)
    assert d.closed(d.o, 5) == [Drained()]
    assert d.wait(1.0, d.w, d.o) == []


def test_drain_with_nothing_open_is_drained_at_once() -> None:
    d = Driver()
    assert d.event(Drain(10_000)) == [Drained()]


def test_at_the_end_of_a_drains_grace_everything_is_aborted() -> None:
    d = Driver(config(max_rows=1))
    w, o = d.worker(), d.owner()
    (row,) = rows(d.submit(o, 1))
    d.submit(o, 2)
    d.event(Drain(1000))
    assert d.machine.next_due() is not None
    d.now += 1.0
    out = d.event(Drain(60_000))  # a second call never lengthens the grace
    (told,) = sent(out, End)
    assert list(told.reason) == [Reason.ABORTED] * 2
    assert sent(out, Leave) == [leave(row.row)]
    assert d.closed(o, 1, reason=Reason.ABORTED) == []
    assert d.closed(o, 2, reason=Reason.ABORTED) == [Drained()]
    assert d.report(w, row.row, Kind.LEFT) == []


def test_a_second_drain_may_shorten_the_grace() -> None:
    d = World()
    d.event(Drain(60_000))
    (told,) = sent(d.event(Drain(0)), End)
    assert list(told.reason) == [Reason.ABORTED]


def test_a_drain_does_not_wait_for_an_owner_that_never_says_closed() -> None:
    d = World()
    d.event(Drain(0))
    assert Drained() in d.wait(1.2, d.w, d.o)


def test_overload_is_refused_and_counted_by_closed() -> None:
    d = Driver(config(max_queued=1, max_rows=1))
    d.worker()
    o = d.owner()
    d.submit(o, 1)
    d.submit(o, 2)
    (told,) = sent(d.submit(o, 3), End)
    assert list(told.reason) == [Reason.REJECTED]
    assert d.requests["closed"] == {}
    d.closed(o, 3, reason=Reason.REJECTED)
    assert d.requests["closed"] == {"rejected": 1}


def test_a_duplicate_submit_is_ignored() -> None:
    d = World()
    assert d.submit(d.o, 5) == []
    assert d.said(d.o, Submit(5, 1, "x", {}, {})) == []
    assert d.requests["submitted"] == 1
    assert d.counters["duplicate_submits"] == 2
