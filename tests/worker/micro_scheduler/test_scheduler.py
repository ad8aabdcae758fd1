"""MicroScheduler: paths, priorities, trials, holding, ends. One decision at a time."""

import itertools

import pytest

from protocol.errors import IllegalTransition
from protocol.messages import ROW_TRIAL, Close, Kind, Limit, Owners, Reason, Run
from tests.support.scheduler_sim import EOS, NODE, OWNER, Sim, make_row
from worker.micro_scheduler.events import OwnerGone, OwnerStalled

DECODE = 100


def test_a_row_joins_the_standing_batch_before_its_prefill_came_back() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(5, [(1, 3), (DECODE, 0)]))
    assert [(s.batch, s.rows) for s in sim.steps] == [(1, [5]), (DECODE, [5])]
    assert sim.steps[0].spans == [(0, 3)]
    assert sim.steps[1].positions == [3]
    assert sim.steps[1].outputs == [1]
    sim.settle()
    assert sim.kinds(5) == [Kind.STARTED, Kind.MOVED, Kind.FINISHED]
    assert sim.last(5).value == 4
    assert sim.last(5).extra == {"reason": Reason.LENGTH, "closed": True}
    assert sim.rows[5].outputs == 4  # max_steps is known ahead: nothing was computed in vain


def test_a_stop_is_learnt_late_and_costs_at_most_depth_minus_one_steps() -> None:
    sim = Sim(depth=3)
    sim.stops_at[5] = 4
    sim.open(DECODE)
    sim.run(1, make_row(5, [(1, 3), (DECODE, 0)], max_steps=50))
    sim.settle()
    assert sim.last(5).value == 4
    assert sim.rows[5].outputs == 4 + 2
    assert 5 in sim.removed


def test_only_the_last_chunk_of_a_prompt_samples() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(5, [(1, 4), (2, 4), (3, 2), (DECODE, 0)], max_steps=2))
    assert [s.batch for s in sim.steps] == [1]  # its next stage's batch has not come
    sim.run(2, 5)
    sim.settle()
    sim.run(3, 5)
    sim.settle()
    assert [(s.batch, s.spans, s.samples) for s in sim.steps[:3]] == [
        (1, [(0, 4)], [False]),
        (2, [(4, 8)], [False]),
        (3, [(8, 10)], [True]),
    ]
    assert sim.kinds(5) == [Kind.STARTED, *[Kind.MOVED] * 3, Kind.FINISHED]


def test_one_shot_batches_go_by_priority_then_in_order() -> None:
    sim = Sim(depth=1)
    sim.run(1, make_row(1, [(1, 1)], 1), plan=False)
    sim.run(2, make_row(2, [(2, 1)], 1), plan=False)
    sim.run(3, make_row(3, [(3, 1)], 1), priority=5, plan=False)
    sim.run(4, make_row(4, [(4, 1)], 1))
    sim.settle()
    assert [s.batch for s in sim.steps] == [3, 1, 2, 4]


def test_at_equal_priority_one_shot_and_standing_steps_alternate() -> None:
    sim = Sim(depth=1)
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 20))
    sim.settle_until(lambda: len(sim.steps) >= 3)
    for b in range(2, 6):
        sim.run(b, make_row(b, [(b, 1)], 1), plan=False)
    start = len(sim.steps)
    sim.settle_until(lambda: len(sim.steps) >= start + 8)
    batches = [s.batch for s in sim.steps[start : start + 8]]
    assert [b for b in batches if b != DECODE] == [2, 3, 4, 5]
    assert all((a == DECODE) != (b == DECODE) for a, b in itertools.pairwise(batches))


def test_a_higher_standing_batch_goes_first() -> None:
    sim = Sim(depth=1)
    sim.open(DECODE, priority=0)
    sim.open(DECODE + 1, priority=9)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 5), make_row(2, [(1, 1), (DECODE + 1, 0)], 5))
    sim.settle()
    assert [s.batch for s in sim.steps[1:]] == [DECODE + 1] * 4 + [DECODE] * 4


def test_leave_finds_a_row_at_whatever_stage_and_waits_for_what_was_launched() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (9, 1), (DECODE, 0)], 9))
    sim.settle()
    sim.leave(1)  # waits for a batch that has not come
    assert sim.kinds(1)[-1] is Kind.LEFT
    sim.run(2, make_row(2, [(2, 1), (DECODE, 0)], 9))
    sim.leave(2)  # two of its steps are launched
    assert sim.kinds(2) == []
    before = len(sim.steps)
    sim.settle()
    assert len(sim.steps) == before
    assert sim.kinds(2) == [Kind.STARTED, Kind.MOVED, Kind.LEFT]
    assert sim.last(2).value == 2
    assert sim.removed == {1, 2}
    sim.leave(1, 2)  # rule 2: ignored
    assert sim.ends == {1: 1, 2: 1}


def test_a_planned_step_may_finish_a_row_that_was_told_to_leave() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 2))
    sim.leave(1)
    sim.settle()
    assert sim.kinds(1)[-1] is Kind.FINISHED


def test_later_stages_of_an_ended_row_are_void() -> None:
    sim = Sim()
    sim.run(1, make_row(1, [(1, 1), (2, 1), (DECODE, 0)], 9))
    sim.fail_next.add(1)
    sim.settle()
    assert sim.kinds(1) == [Kind.FAILED]
    sim.run(2, 1, make_row(3, [(2, 1)], 1))
    sim.settle()
    assert [s.rows for s in sim.steps] == [[1], [3]]


def test_one_row_fails_alone_though_its_next_step_was_launched() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, *[make_row(r, [(1, 2), (DECODE, 0)], 6) for r in (1, 2, 3)])
    sim.turn()
    sim.fail_next.add(2)
    sim.settle()
    assert sim.kinds(2)[-1] is Kind.FAILED
    assert [sim.last(r).value for r in (1, 3)] == [6, 6]


def test_a_skipped_row_comes_back_with_the_steps_that_were_behind_it() -> None:
    sim = Sim(depth=3)
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 2), (DECODE, 0)], 6), make_row(2, [(1, 2), (DECODE, 0)], 6))
    sim.skip_next.add(1)  # its prefill, while two decode steps of it are in flight
    sim.settle()
    assert [sim.last(r).value for r in (1, 2)] == [6, 6]
    assert sim.kinds(1) == [Kind.STARTED, Kind.MOVED, Kind.FINISHED]


def test_trial_rows_step_with_nothing_beside_them() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 40))
    sim.turn()
    sim.run(2, make_row(2, [(2, 1), (DECODE, 0)], 9, flags=ROW_TRIAL))
    start = len(sim.steps)
    sim.settle()
    during = [s for s in sim.steps[start:] if s.rows == [2]]
    assert len(during) >= 4
    mine = [i for i, s in enumerate(sim.steps) if s.rows == [2]]
    assert mine == list(range(mine[0], mine[0] + len(mine)))  # alone, and on end
    # Four tokens past its history it is a row like any other, and the conductor hears it at once.
    assert [s.value for s in sim.said if s.row == 2 and s.kind is Kind.PROGRESS] == [4]
    assert any(set(s.rows) == {1, 2} for s in sim.steps)


def test_a_trial_waits_until_steps_of_others_came_back() -> None:
    sim = Sim(depth=2)
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 40))
    sim.run(2, make_row(2, [(2, 1), (DECODE, 0)], 9, flags=ROW_TRIAL))
    assert all(s.rows == [1] for s in sim.steps)
    sim.turn()
    assert [s.rows for s in sim.steps] == [[1], [1]]
    sim.turn()
    assert [s.rows for s in sim.steps][-2:] == [[2], [2]]


def test_a_limit_parks_and_unparks() -> None:
    sim = Sim()
    sim.open(DECODE, limit=2)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 6))
    sim.settle()
    assert [s.batch for s in sim.steps] == [1, DECODE, DECODE]
    sim.give(Limit(DECODE, 3))
    sim.settle()
    assert len(sim.steps) == 4
    sim.give(Limit(DECODE, None))
    sim.settle()
    assert sim.kinds(1)[-1] is Kind.FINISHED


def test_close_needs_an_empty_batch_and_tells_the_story() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 6))
    with pytest.raises(IllegalTransition, match="batch 100: no transition from OPEN on CLOSE_BUSY"):
        sim.give(Close(DECODE))
    sim.settle()
    sim.give(Close(DECODE))
    assert sim.scheduler.inventory()["batches"] == []


def test_a_batch_comes_once() -> None:
    sim = Sim()
    sim.open(DECODE)
    with pytest.raises(IllegalTransition):
        sim.open(DECODE)


def test_a_history_that_meets_its_stop_ends_without_a_step() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 3), (DECODE, 0)], 0, base=2))
    sim.run(2, make_row(2, [(2, 3), (DECODE, 0)], 9, base=1, tokens=[4, 5, EOS]))
    sim.settle()
    assert sim.steps == []
    assert [(s.kind, s.value) for s in sim.said] == [(Kind.FINISHED, 2), (Kind.FINISHED, 1)]
    assert [(s.extra or {})["reason"] for s in sim.said] == [Reason.LENGTH, Reason.STOP]
    assert sim.removed == {1, 2}


def test_a_prompt_that_ends_in_eos_is_no_history() -> None:
    sim = Sim()
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 3), (DECODE, 0)], 2, tokens=[4, 5, EOS]))
    sim.settle()
    assert sim.last(1).value == 2


@pytest.mark.parametrize(
    ("row", "why"),
    [
        (make_row(1, [(1, 3), (DECODE, 0)], tokens=[1, 2]), "consume 3 tokens; it brings 2"),
        (make_row(1, [(1, 3), (DECODE, 0)], owner=55), "was not announced"),
        (make_row(1, [(DECODE, 0), (1, 3)]), "only the last stage"),
    ],
)
def test_a_row_that_makes_no_sense_fails_at_once(row, why) -> None:
    sim = Sim()
    sim.run(1, row)
    sim.settle()
    assert sim.kinds(1) == [Kind.FAILED]
    assert why in (sim.last(1).extra or {})["error"]["message"]
    assert sim.steps == []
    assert sim.rows == {}


def test_an_unknown_model_is_named() -> None:
    sim = Sim()
    sim.give(Run(1, "other/node", "prefill", 0, [make_row(1, [(1, 3)])]))
    assert (sim.last(1).extra or {})["error"]["code"] == "unknown_model"


def test_without_space_the_youngest_is_held_once_and_resumes_oldest_first() -> None:
    # Rows of 9, 9 and 13 tokens of state, room for 26: they cannot all grow to their end at once.
    sim = Sim(pages=26)
    sim.open(DECODE)
    sim.run(1, *[make_row(r, [(1, 2), (DECODE, 0)], n) for r, n in ((1, 8), (2, 8), (3, 12))])
    sim.settle()
    assert [sim.last(r).kind for r in (1, 2, 3)] == [Kind.FINISHED] * 3
    assert Kind.HELD not in sim.kinds(1)
    assert sim.kinds(3).count(Kind.HELD) == sim.kinds(3).count(Kind.RESUMED) == 1
    assert sim.used == 0


def test_when_nothing_fits_beside_it_the_youngest_is_preempted_for_the_oldest() -> None:
    sim = Sim(pages=12)
    sim.open(DECODE)
    sim.run(1, *[make_row(r, [(1, 4), (DECODE, 0)], 8) for r in (1, 2)])
    sim.settle()
    assert sim.kinds(1)[-1] is Kind.FINISHED
    assert sim.kinds(2)[-1] is Kind.PREEMPTED
    assert sim.used == 0


def test_pages_freed_behind_a_refused_step_count_for_it() -> None:
    sim = Sim(pages=10)
    sim.open(DECODE)
    sim.run(1, *[make_row(r, [(1, 1), (DECODE, 0)], n) for r, n in ((1, 3), (2, 6), (3, 4))])
    for _ in range(2):  # two steps are done before main hears of the first
        sim.step()
        sim.step()
        sim.finish()
        sim.finish()
    # Row 1 ended in step 3; step 4, launched before its pages went, was refused.
    assert (sim.kinds(1)[-1], sim.kinds(3)[-1]) == (Kind.FINISHED, Kind.HELD)
    sim.settle()
    ends = [s.row for s in sim.said if s.kind.ends]
    assert ends.index(3) < ends.index(2), "row 3 waited for row 2 though there was room"


def test_what_could_never_fit_is_refused_with_the_numbers() -> None:
    sim = Sim(pages=6)
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 9), (DECODE, 0)], 8))
    sim.settle()
    assert sim.kinds(1) == [Kind.HELD, Kind.REFUSED]
    error = (sim.last(1).extra or {})["error"]
    assert (error["code"], error["message"]) == ("cannot_fit", "no page")
    assert error["story"][-1] == "HELD -REFUSE-> ENDED (3)"


def test_a_stalled_owner_holds_its_rows_and_no_others() -> None:
    sim = Sim(depth=1)
    sim.give(Owners(8, "memory://8", True))
    sim.open(DECODE)
    sim.run(
        1, make_row(1, [(1, 1), (DECODE, 0)], 9), make_row(2, [(1, 1), (DECODE, 0)], 9, owner=8)
    )
    sim.turn()
    sim.give(OwnerStalled(8, True))
    sim.settle()
    assert sim.kinds(1)[-1] is Kind.FINISHED
    assert sim.kinds(2)[-1] is Kind.HELD
    sim.give(OwnerStalled(8, False))
    sim.settle()
    assert sim.kinds(2)[-2:] == [Kind.RESUMED, Kind.FINISHED]


def test_rows_of_an_owner_that_goes_leave_and_of_one_that_is_stuck_fail() -> None:
    sim = Sim()
    sim.give(Owners(8, "memory://8", True))
    sim.open(DECODE)
    sim.run(
        1, make_row(1, [(1, 1), (DECODE, 0)], 9), make_row(2, [(1, 1), (DECODE, 0)], 9, owner=8)
    )
    sim.give(Owners(8, "", False))
    sim.give(OwnerGone(OWNER, {"code": "failed", "message": "stuck"}))
    sim.settle()
    assert sim.kinds(1)[-1] is Kind.FAILED
    assert sim.kinds(2)[-1] is Kind.LEFT
    assert sim.removed == {1, 2}


def test_progress_tells_changed_rows_only_and_each_change_once() -> None:
    sim = Sim(depth=1)
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 9))
    sim.run(2, make_row(2, [(2, 1), (3, 1), (DECODE, 0)], 9))
    for _ in range(4):
        sim.turn()
    told = sim.scheduler.progress()
    assert [(s.row, s.kind, s.value) for s in told] == [(1, Kind.PROGRESS, 3)]
    assert sim.scheduler.progress() == []


def test_the_inventory_names_live_rows_and_batches() -> None:
    sim = Sim(depth=1)
    sim.open(DECODE)
    sim.run(1, make_row(1, [(1, 1), (DECODE, 0)], 9, base=3))
    sim.turn()
    sim.turn()
    assert sim.scheduler.inventory() == {"rows": [[1, 1, 5]], "batches": [DECODE]}


def test_a_step_beyond_the_table_names_the_row_and_its_story() -> None:
    sim = Sim()
    sim.give(Run(1, NODE, "prefill", 0, [make_row(1, [(1, 1)], 1)]))
    sim.step()
    done = sim.done[0]
    sim.finish()
    with pytest.raises(Exception, match="step 1 came back"):
        sim.give(done)
