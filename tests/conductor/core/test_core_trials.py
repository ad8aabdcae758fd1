"""Rule 16: suspects, halves, acquittal, quarantine."""

import pytest

from protocol.messages import ROW_TRIAL, End, Kind, Reason, Rebase, Row
from tests.support.conductor_driver import Driver, config, rows, sent, spec
from tests.support.conductor_harness import Simulation
from tests.support.conductor_sim_worker import POISON


class Crashed(Driver):
    """`n` rows were live when their worker crashed inside a step; all histories are told."""

    def __init__(self, n: int, **limits: int) -> None:
        super().__init__(config(**limits))
        self.first = self.worker("w0", spec(pages=4096))
        self.gw = self.owner()
        placed: list[Row] = []
        for stream in range(n):
            placed += rows(self.submit(self.gw, stream))
            for row in placed:
                placed += rows(self.report(self.first, row.row, Kind.MOVED, 1))
        assert len(placed) == n
        self.exited(self.first)
        self.attempts = dict.fromkeys(range(n), 2)
        self.tell(range(n))

    def tell(self, streams: object) -> None:
        for stream in streams:  # type: ignore[attr-defined]
            self.history(self.gw, stream, self.attempts[stream], [7] * 3)

    def next_trial(self) -> tuple[int, list[Row]]:
        worker = self.worker(f"w{self.now}", spec(pages=4096))
        self.now += 0.01
        return worker, rows(self.last, worker)

    def crash(self, worker: int) -> None:
        out = self.exited(worker)
        for message in sent(out, Rebase):
            for stream, attempt in zip(message.stream, message.attempt, strict=True):
                self.attempts[stream] = attempt
            self.tell(message.stream)

    def clear(self, worker: int, trial: list[Row], position: int = 7) -> list[Row]:
        """All rows of the trial reach this position."""
        out = []
        for row in trial:
            out += rows(self.report(worker, row.row, Kind.PROGRESS, position))
        return out


def test_all_rows_of_a_crash_are_suspects_and_run_alone_in_halves() -> None:
    d = Crashed(6)
    _, trial = d.next_trial()
    assert [r.stream for r in trial] == [0, 1, 2]
    assert all(r.flags & ROW_TRIAL for r in trial)
    assert d.submit(d.gw, 50) == []  # nothing beside a trial, not even where there is room
    _, other = d.next_trial()
    assert [r.stream for r in other] == [3, 4, 5]


def test_four_tokens_past_its_history_the_group_is_acquitted_as_a_whole() -> None:
    d = Crashed(4)
    worker, trial = d.next_trial()
    d.submit(d.gw, 50)
    assert d.clear(worker, trial, 6) == []
    assert d.clear(worker, trial[:1], 7) == []
    assert [r.stream for r in d.clear(worker, trial[1:], 7)] == [50]
    assert d.counters["acquitted"] == 2


def test_a_member_that_ends_survived() -> None:
    d = Crashed(4)
    worker, trial = d.next_trial()
    d.submit(d.gw, 50)
    d.report(worker, trial[0].row, Kind.FINISHED, 5, closed=True)
    assert rows(d.report(worker, trial[1].row, Kind.FAILED)) == []
    # the second half is next here, before what waits in the queue; but first the worker must owe
    # nothing that a crash would take along
    out = d.report(worker, trial[0].row, Kind.SETTLED)
    assert [r.stream for r in rows(out)] == [2, 3]


def test_an_outside_death_charges_nobody() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    d.submit(owner, 1)
    d.submit(owner, 2)
    d.exited(worker, outside=True)
    d.worker()
    for stream in (1, 2):
        (row,) = rows(d.history(owner, stream, 2, []))
        assert not row.flags & ROW_TRIAL
    assert d.counters["trials"] == 0


def test_an_outside_death_leaves_suspects_suspect() -> None:
    d = Crashed(4)
    worker, trial = d.next_trial()
    d.report(worker, trial[0].row, Kind.PROGRESS, 7)  # it is proven, the other one not
    d.exited(worker, outside=True)
    for stream in (0, 1):
        d.attempts[stream] = 3
    d.tell([0, 1])
    _, second = d.next_trial()
    assert [r.stream for r in second] == [2, 3]
    _, again = d.next_trial()
    assert [(r.stream, bool(r.flags & ROW_TRIAL)) for r in again] == [(1, True)]


def test_a_single_row_that_crashes_on_trial_is_quarantined() -> None:
    d = Crashed(1)
    worker, (row,) = d.next_trial()
    assert row.flags & ROW_TRIAL
    (told,) = sent(d.exited(worker), End)
    assert list(told.reason) == [Reason.QUARANTINED]
    assert told.detail[0]["code"] == "quarantined"
    d.closed(d.gw, 0, reason=Reason.QUARANTINED)
    assert d.requests["closed"] == {"quarantined": 1}


def test_a_row_that_crashes_after_its_acquittal_is_a_suspect_again() -> None:
    d = Crashed(1)
    worker, trial = d.next_trial()
    d.clear(worker, trial)
    assert sent(d.exited(worker), End) == []
    d.attempts[0] = 3
    d.tell([0])
    _, again = d.next_trial()
    assert again[0].flags & ROW_TRIAL


def test_nobody_is_convicted_beside_a_row_that_was_asked_to_leave() -> None:
    d = Crashed(4)
    worker, trial = d.next_trial()
    assert [r.stream for r in trial] == [0, 1]
    d.closed(d.gw, 0, reason=Reason.CANCELLED)  # it still steps until its end is reported
    out = d.exited(worker)
    assert sent(out, End) == []
    assert [list(m.stream) for m in sent(out, Rebase)] == [[1]]


def test_a_settled_or_ended_row_is_no_suspect() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    (a,) = rows(d.submit(owner, 1))
    d.submit(owner, 2)
    d.report(worker, a.row, Kind.FINISHED, 8, closed=True)
    d.exited(worker)
    d.history(owner, 1, 2, range(8))
    d.history(owner, 2, 2, [])
    w1 = d.worker("w1")
    assert [(r.stream, r.flags & ROW_TRIAL) for r in rows(d.last, w1)] == [(2, ROW_TRIAL)]
    w2 = d.worker("w2")
    assert [(r.stream, r.flags & ROW_TRIAL) for r in rows(d.last, w2)] == [(1, 0)]


def test_a_group_waits_for_all_its_histories_and_goes_without_who_is_gone() -> None:
    d = Driver()
    worker, owner = d.worker(), d.owner()
    for stream in (1, 2):
        d.submit(owner, stream)
    d.submit(owner, 3)  # queued, never ran: no suspect
    d.report(worker, 0, Kind.MOVED)
    d.exited(worker)
    d.worker("w1")
    assert [r.stream for r in rows(d.last)] == [3]
    d.worker("w2")
    assert rows(d.last) == []
    assert [r.stream for r in rows(d.history(owner, 2, 2, []))] == [2]  # halves: 1 and 2
    d.closed(owner, 1, reason=Reason.CANCELLED)
    assert d.requests["queued"] == 0


def test_without_an_empty_worker_one_is_emptied_in_the_end() -> None:
    d = Driver(config(max_rows=8))
    sick, healthy, owner = d.worker("w0"), d.worker("w1"), d.owner()
    placed = {}
    for stream in (1, 2):
        for row in rows(d.submit(owner, stream)):
            placed[row.stream] = row
    d.exited(sick)
    d.history(owner, 1, 2, [])
    (third,) = rows(d.submit(owner, 3), healthy)  # at first it goes on as if nothing were
    d.report(healthy, placed[2].row, Kind.MOVED, 1)
    assert rows(d.wait(6.0, healthy, owner)) == []
    assert d.submit(owner, 4) == []  # now it takes nobody until the trial had its turn
    d.report(healthy, placed[2].row, Kind.FINISHED, 8, closed=True)
    d.report(healthy, third.row, Kind.FINISHED, 8, closed=True)
    d.closed(owner, 2)
    out = d.closed(owner, 3)
    assert [(r.stream, r.flags & ROW_TRIAL) for r in rows(out)] == [(1, ROW_TRIAL)]


def test_a_group_is_never_larger_than_its_replays_can_tell_apart() -> None:
    d = Crashed(40)
    sizes = [len(d.next_trial()[1]) for _ in range(5)]
    assert sizes == [8, 8, 8, 8, 8]


def test_a_group_that_no_worker_holds_at_once_is_split() -> None:
    d = Crashed(8)
    worker = d.worker("small", spec(pages=2))
    assert len(rows(d.last, worker)) == 2
    assert all(r.flags & ROW_TRIAL for r in rows(d.last, worker))


def test_a_preempted_suspect_stays_one() -> None:
    d = Crashed(1)
    worker, (row,) = d.next_trial()
    d.report(worker, row.row, Kind.PREEMPTED, 3)
    (again,) = rows(d.history(d.gw, row.stream, 3, [7] * 3))
    assert again.flags & ROW_TRIAL


def test_the_guilty_is_found_and_its_neighbours_saved_within_four_replays() -> None:
    """By hand: the guilty one is the last of 8 in its group."""
    d = Crashed(8)
    guilty = 3
    ended: list[int] = []
    for _ in range(20):
        worker, trial = d.next_trial()
        if not trial:
            break
        if guilty in [r.stream for r in trial]:
            out = d.exited(worker)
            for end in sent(out, End):
                ended += list(end.stream)
                assert list(end.reason) == [Reason.QUARANTINED]
            for message in sent(out, Rebase):
                for stream, attempt in zip(message.stream, message.attempt, strict=True):
                    assert attempt <= 5
                    d.attempts[stream] = attempt
                d.tell(message.stream)
        else:
            d.clear(worker, trial)
    assert ended == [guilty]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("workers", [1, 2])
def test_poison_among_twenty_is_quarantined_and_all_others_succeed(seed: int, workers: int) -> None:
    sim = Simulation(config(prefill_tokens=64, max_rows=32), spec(pages=4096), seed)
    for i in range(workers):
        sim.start_worker(f"w{i}")
    owner = sim.start_owner("gw")
    while moves := sim.moves():
        sim.deliver(*moves[0])
    bad = sim.random.randrange(20)
    streams = [
        sim.submit(
            owner,
            [sim.random.randrange(POISON) for _ in range(4)] + [POISON] * (i == bad),
            20,
        )
        for i in range(20)
    ]
    sim.settle()
    sim.check_answers()
    reasons = {i: sim.answer(owner, s)[0] for i, s in enumerate(streams)}
    assert reasons.pop(bad) is Reason.QUARANTINED
    assert set(reasons.values()) == {Reason.LENGTH}
    assert 2 <= sim.crashes <= 5
