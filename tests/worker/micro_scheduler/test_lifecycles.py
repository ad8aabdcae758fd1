"""The row and batch tables: complete where they must be, closed where they must be."""

import pytest

from protocol.errors import IllegalTransition
from protocol.lifecycle import STORY, Lifecycle
from worker.micro_scheduler import batch_lifecycle, row_lifecycle
from worker.micro_scheduler.batch_lifecycle import BatchEvent, BatchState
from worker.micro_scheduler.row_lifecycle import RowEvent, RowState

ENDS = (RowEvent.FINISH, RowEvent.FAIL, RowEvent.REFUSE, RowEvent.PREEMPT)


def test_an_ended_row_takes_nothing_but_a_late_leave() -> None:
    taken = [e for (s, e) in row_lifecycle.TABLE if s is RowState.ENDED]
    assert taken == [RowEvent.LEAVE, RowEvent.LEAVE_LATER]
    assert row_lifecycle.TABLE[RowState.ENDED, RowEvent.LEAVE] is RowState.ENDED


@pytest.mark.parametrize(
    ("state", "event"), [(s, e) for s in RowState if s is not RowState.ENDED for e in ENDS]
)
def test_any_live_row_can_end(state: RowState, event: RowEvent) -> None:
    assert row_lifecycle.TABLE[state, event] is RowState.ENDED


def test_a_held_row_does_not_run() -> None:
    after = {row_lifecycle.TABLE[s, e] for s, e in row_lifecycle.TABLE if s is RowState.HELD}
    assert RowState.RUNNING not in after


def test_done_and_closed_batches_take_nothing() -> None:
    states = {s for s, _ in batch_lifecycle.TABLE}
    assert states == {BatchState.PLANNED, BatchState.OPEN, BatchState.PARKED}
    assert not {BatchEvent.CLOSE_BUSY, BatchEvent.OPEN_AGAIN} & {
        e for _, e in batch_lifecycle.TABLE
    }


def test_a_parked_batch_does_not_step() -> None:
    assert (BatchState.PARKED, BatchEvent.STEP) not in batch_lifecycle.TABLE


def test_a_missing_pair_brings_the_last_changes() -> None:
    life = Lifecycle("row 0x9", RowState.WAITING, row_lifecycle.TABLE)
    for step in range(1, STORY + 3):
        life.on(RowEvent.STEP, step)
        life.on(RowEvent.STEP, step)  # a row that keeps running tells no story
        life.on(RowEvent.MOVE, step)
    life.on(RowEvent.LEAVE, 40)
    with pytest.raises(IllegalTransition) as e:
        life.on(RowEvent.FINISH, 41)
    told = str(e.value).splitlines()
    assert told[0] == "row 0x9: no transition from ENDED on FINISH:"
    assert told[-1] == "  WAITING -LEAVE-> ENDED (40)"
    assert told[-2] == f"  RUNNING -MOVE-> WAITING ({STORY + 2})"
    assert len(told) == 1 + STORY
