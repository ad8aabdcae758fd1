"""Hello: refusals, inventories, what a new session repeats (rules 19 and 20)."""

from typing import Any

import pytest

from conductor.core.commands import Forget, Send
from protocol import PROTOCOL_VERSION
from protocol.graph import spec_to_wire
from protocol.messages import (
    Beat,
    Bye,
    End,
    Hello,
    Kind,
    Leave,
    Open,
    Owners,
    Reason,
    Rebase,
    Refuse,
    Run,
    Welcome,
)
from tests.support.conductor_driver import LIFE, Driver, config, leave, rows, sent, spec


def test_a_worker_is_welcomed_and_told_of_the_owners_before_any_run() -> None:
    d = Driver()
    owner = d.owner()
    worker = d.worker()
    welcome = Send(
        worker,
        Welcome(
            LIFE,
            PROTOCOL_VERSION,
            200,
            {
                "models": {"m": {"context": 256, "vocab": 1000}},
                "max_tokens": 1 << 20,
                "prefill_tokens": 2048,
                "max_rows": 256,
                "silence_ms": 2000,
            },
        ),
    )
    assert d.last == [welcome, Send(worker, Owners(owner, "ipc://gw", True))]


def test_an_owner_is_announced_to_workers_before_its_rows() -> None:
    d = Driver()
    worker = d.worker()
    owner = d.owner()
    assert sent(d.last, Owners, worker) == [Owners(owner, "ipc://gw", True)]
    assert sent(d.last, Welcome, owner)[0].limits["models"] == {
        "m": {"context": 256, "vocab": 1000}
    }


def test_what_waited_runs_as_soon_as_a_worker_is_ready_after_its_owners() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    d.exited(worker, outside=True)
    d.submit(owner, 1)
    d.worker()
    kinds = [type(c.message) for c in d.last if isinstance(c, Send)]
    assert kinds == [Welcome, Owners, Open, Run]


@pytest.mark.parametrize(
    ("changes", "code", "says"),
    [
        ({"versions": [99]}, "version", "99"),
        ({"role": "king"}, "resync", "king"),
        ({"life": 3}, "resync", "0x3"),
        ({"specs": []}, "version", "at least one model"),
        ({"specs": [{"model": "m"}]}, "version", "graph"),
        ({"specs": [spec_to_wire(spec(context=0))]}, "version", "context"),
        ({"specs": [spec_to_wire(spec(pages=4, page_tokens=0))]}, "version", "pool"),
        ({"specs": [spec_to_wire(spec(max_batch={"a/b": 0}))]}, "version", "batch"),
    ],
)
def test_a_worker_that_makes_no_sense_is_refused(
    changes: dict[str, Any], code: str, says: str
) -> None:
    d = Driver()
    values: dict[str, Any] = {
        "role": "worker", "name": "w", "life": 9, "versions": [1],
        "specs": [spec_to_wire(spec())], **changes,
    }  # fmt: skip
    out = d.said(9, Hello(**values))
    (refused,) = sent(out, Refuse, 9)
    assert refused.code == code
    assert says in refused.text
    assert Forget(9) in out
    assert d.snapshot["workers"] == []


def test_a_name_belongs_to_one_living_worker() -> None:
    d = Driver()
    first = d.worker("w0")
    d.worker("w0")
    assert sent(d.last, Refuse)[0].code == "name_taken"
    d.exited(first)
    d.worker("w0")
    assert sent(d.last, Welcome)


def test_replicas_must_agree() -> None:
    d = Driver()
    first = d.worker("w0")
    d.worker("w1", spec(context=512))
    (refused,) = sent(d.last, Refuse)
    assert "worker w0 in context: 512 here, 256 there" in refused.text
    second = d.worker("w2", spec(pages=7, max_batch={"decoder/decode": 2}))
    assert sent(d.last, Welcome)
    d.exited(first)
    d.exited(second)
    d.worker("w3", spec(context=512))
    assert sent(d.last, Welcome)


def test_a_life_has_one_role() -> None:
    d = Driver()
    worker = d.worker()
    d.owner(life=worker)
    assert sent(d.last, Refuse)[0].code == "resync"


# ---- rule 19


class Reset(Driver):
    """A worker with two running rows loses its session."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.o = self.worker(), self.owner()
        self.a, self.b = (rows(self.submit(self.o, s))[0] for s in (1, 2))
        for row in (self.a, self.b):
            self.report(self.w, row.row, Kind.MOVED, 1)
        self.link_down(self.w)

    def again(self, **inventory: Any) -> list[Any]:
        self.worker("w0", life=self.w, inventory=inventory)
        return self.last

    def both(self, stage: int = 1) -> list[list[int]]:
        return [[self.a.row, stage, 3], [self.b.row, stage, 4]]


STANDING = 2  # the batch that the first row opened


def test_a_complete_inventory_changes_nothing() -> None:
    d = Reset()
    out = d.again(rows=d.both(), ends=[], batches=[STANDING])
    assert [type(c.message) for c in out] == [Welcome, Owners]
    assert len(rows(d.submit(d.o, 3))) == 1


def test_wanted_but_absent_is_lost() -> None:
    d = Reset()
    out = d.again(rows=d.both()[:1], ends=[], batches=[STANDING])
    (told,) = sent(out, Rebase)
    assert (list(told.stream), list(told.attempt)) == ([2], [2])
    assert sent(out, Leave) == []
    (row,) = rows(d.history(d.o, 2, 2, [4]))
    assert row.row not in (d.a.row, d.b.row)


def test_present_but_unwanted_leaves() -> None:
    d = Reset()
    out = d.again(rows=[*d.both(), [77, 0, 0]], ends=[], batches=[STANDING])
    assert sent(out, Leave) == [leave(77)]


def test_a_leave_that_was_lost_is_said_again() -> None:
    d = Reset()
    assert d.closed(d.o, 1, reason=Reason.CANCELLED) == []  # there is no session to say it in
    out = d.again(rows=d.both(), ends=[], batches=[STANDING])
    assert sent(out, Leave) == [leave(d.a.row)]


def test_unacknowledged_ends_are_taken_from_the_inventory() -> None:
    d = Reset()
    ends = [[d.a.row, 16, 8], [d.b.row, 18, 2, {"error": {"code": "failed"}}]]
    out = d.again(rows=[], ends=ends, batches=[STANDING])
    (end,) = sent(out, End)
    assert (list(end.stream), list(end.reason)) == ([1, 2], [Reason.DONE, Reason.FAILED])
    assert (end.counts, end.detail) == ([[8], []], [{}, {"code": "failed"}])
    assert sent(out, Rebase) == []


def test_a_lost_open_is_said_again_for_rows_that_will_name_it() -> None:
    d = Driver(config(prefill_tokens=16))
    w, o = d.worker(), d.owner()
    d.submit(o, 1, prompt=50)
    d.submit(o, 2)  # planned, in the batch of the other's last chunk; not sent
    d.link_down(w)
    d.worker("w0", life=w, inventory={"rows": [], "ends": [], "batches": []})
    kinds = [type(c.message) for c in d.last if isinstance(c, Send)]
    assert kinds == [Welcome, Owners, Rebase, Open, Run]
    assert [r.stream for r in rows(d.last)] == [2]


def test_a_lost_run_of_a_later_stage_rebases_the_row() -> None:
    d = Driver(config(prefill_tokens=16))
    w, o = d.worker(), d.owner()
    (row,) = rows(d.submit(o, 1, prompt=50))
    d.link_down(w)
    inventory = {"rows": [[row.row, 1, 0]], "ends": [], "batches": [row.path[-1][0]]}
    d.worker("w0", life=w, inventory=inventory)
    assert sent(d.last, Leave) == [leave(row.row)]
    assert [list(m.stream) for m in sent(d.last, Rebase)] == [[1]]


def test_an_empty_standing_batch_that_the_worker_lost_is_opened_anew_when_needed() -> None:
    d = Reset()
    ends = [[r, 17, 0] for r in (d.a.row, d.b.row)]
    d.closed(d.o, 1, 2)
    d.again(rows=[], ends=ends, batches=[])
    (opened,) = sent(d.submit(d.o, 3), Open)
    assert opened.batch != STANDING


def test_owners_lost_meanwhile_are_told_down_again() -> None:
    d = Reset()
    d.said(d.o, Bye("closing"))
    out = d.again(rows=d.both(), ends=[], batches=[STANDING])
    assert sent(out, Owners) == [Owners(d.o, "ipc://gw", False)]
    assert sent(out, Leave) == [leave(d.a.row, d.b.row)]


@pytest.mark.parametrize(
    "inventory",
    [
        {"rows": 7, "ends": None, "batches": {}},
        {"rows": [7, [1], ["a", 1, 2], [[], 1, 2]], "ends": [[1, 2]], "batches": ["x"]},
        {"rows": [[1 << 70, -1, -5]], "ends": [[0, 99, 0, 5]], "batches": [None]},
    ],
)
def test_an_inventory_of_nonsense_is_an_empty_one(inventory: dict[str, Any]) -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.submit(o, 1)
    inventory = {**inventory, "streams": inventory["rows"]}
    d.worker("w0", life=w, inventory=inventory)
    d.owner(life=o, inventory=inventory)


# ---- rule 20


def test_an_awaited_rebase_and_end_are_repeated() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    (a,) = rows(d.submit(o, 1))
    d.submit(o, 2)
    d.submit(o, 3, prompt=[])
    d.report(w, a.row, Kind.FINISHED, 8, acked=8, reason=Reason.LENGTH)
    d.exited(w, outside=True)
    d.link_down(o)
    d.owner(life=o, inventory={"streams": [[1, 1, 5], [2, 1, 0], [3, 1, 0]]})
    (told,) = sent(d.last, Rebase)
    assert (list(told.stream), list(told.attempt)) == ([2], [2])
    (end,) = sent(d.last, End)
    assert (list(end.stream), end.counts) == ([1, 3], [[8], []])
    assert list(end.reason) == [Reason.LENGTH, Reason.REJECTED]


def test_an_end_that_a_rebase_forgot_is_not_repeated() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    (row,) = rows(d.submit(o, 1))
    d.report(w, row.row, Kind.FINISHED, 8, reason=Reason.LENGTH)
    d.exited(w, outside=True)
    d.history(o, 1, 2, [1] * 5)
    d.owner(life=o, inventory={"streams": [[1, 2, 5]]})
    assert sent(d.last, End) == []


def test_known_streams_are_ignored_and_unknown_ones_rebased() -> None:
    d = Driver()
    d.worker()
    o = d.owner(inventory={"streams": [[8, 3, 5]]})
    d.submit(o, 1)
    out = d.submit(o, 8, attempt=3)
    (told,) = sent(out, Rebase)
    assert (list(told.stream), list(told.attempt)) == ([8], [4])
    assert rows(out) == []
    (row,) = rows(d.history(o, 8, 4, [1] * 5))
    assert (row.attempt, row.base) == (4, [5])
    assert d.submit(o, 8, attempt=3) == []
    assert d.requests["submitted"] == 2


def test_a_resubmitted_stream_is_not_refused_for_a_full_queue() -> None:
    d = Driver(config(max_queued=1, max_rows=1))
    d.worker()
    o = d.owner(inventory={"streams": [[8, 1, 5]]})
    d.submit(o, 1)
    d.submit(o, 2)
    assert sent(d.submit(o, 8), End) == []


def test_a_stream_that_the_owner_no_longer_holds_gets_no_more_work_until_it_says_closed() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    (row,) = rows(d.submit(o, 1))
    d.owner(life=o, inventory={"streams": []})
    assert sent(d.last, Leave) == [leave(row.row)]
    assert sent(d.last, End) == []
    d.closed(o, 1, reason=Reason.STOP)
    assert d.requests["closed"] == {"stop": 1}
    d.report(w, row.row, Kind.LEFT)


def test_what_a_peer_says_without_a_session_is_dropped() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.link_down(o)
    assert d.submit(o, 1) == []
    assert d.said(0x777, Beat()) == []
    assert d.requests["submitted"] == 0
    assert d.counters["dropped_messages"] == 2
    assert d.report(w, 1, Kind.MOVED) == []


def test_an_owner_that_moves_is_announced_again() -> None:
    d = Driver()
    w, o = d.worker(), d.owner()
    d.owner(life=o)
    assert sent(d.last, Owners) == []
    d.owner(life=o, endpoint="ipc://elsewhere")
    assert sent(d.last, Owners, w) == [Owners(o, "ipc://elsewhere", True)]
