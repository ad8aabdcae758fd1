"""A step came back: rows move on, end, or are put back to where they stood before it."""

from collections.abc import Iterable, Sequence

from protocol.errors import InvariantViolation
from protocol.messages import Kind
from worker.micro_scheduler.decisions import Unblock
from worker.micro_scheduler.events import Refusal, RowEnd, StepDone
from worker.micro_scheduler.records import Place, RowRecord, StepRecord
from worker.micro_scheduler.row_lifecycle import RowEvent, RowState
from worker.micro_scheduler.state import State


def step_done(s: State, e: StepDone) -> None:
    record = s.flights.pop(e.step, None)
    if record is None:
        raise InvariantViolation(f"step {e.step} came back, in flight are {sorted(s.flights)}")
    special = _special(record, e)
    if e.refusal is not None:
        s.counts["refused_steps"] += 1
    for i in special:
        _came_back(s, record, i, e)
    if e.refusal is not None:
        _refused(s, record, e.refusal)
    _settle(s, [record.rows[i] for i in special])


def _special(record: StepRecord, e: StepDone) -> Sequence[int]:
    """Indices of the rows that need a closer look; the others only went one token further. In a
    steady batch there are none, and this loop is all that a step costs."""
    if not record.batch.standing or e.refusal is not None or e.error is not None:
        return range(len(record.rows))
    told = e.failed.keys() | e.never.keys() | e.ends.keys() | e.returned
    special: list[int] = []
    for i, row in enumerate(record.rows):
        if row.plain and row.row not in told:
            row.in_flight -= 1
            row.emitted += 1
        else:
            special.append(i)
    return special


def _came_back(s: State, record: StepRecord, i: int, e: StepDone) -> None:
    row = record.rows[i]
    row.in_flight -= 1
    if row.ended:
        if row.in_flight == 0:
            s.retire(row)
    elif row.row in e.failed:
        s.end(row, RowEvent.FAIL, Kind.FAILED, {"error": e.failed[row.row]})
    elif row.row in e.never:
        s.end(row, RowEvent.REFUSE, Kind.REFUSED, {"error": e.never[row.row]})
    elif row.row in e.ends:
        _finish(s, row, e.ends[row.row])
    elif e.refusal is not None or row.row in e.returned:
        _put_back(s, row, record.before(i))
    elif e.error is not None:
        s.end(row, RowEvent.FAIL, Kind.FAILED, {"error": e.error})
    else:
        _ran(s, row, record, i)


def _finish(s: State, row: RowRecord, end: RowEnd) -> None:
    row.emitted = end.count - row.start
    s.end(row, RowEvent.FINISH, Kind.FINISHED, end.extra())


def _ran(s: State, row: RowRecord, record: StepRecord, i: int) -> None:
    row.emitted += record.planned.samples[i]
    if not row.started:
        row.started = True
        s.say(row, Kind.STARTED)
    row.tried_alone = False
    if row.no_space:
        del row.pool.waiting[row.row]
        s.release(row)
    if not record.batch.standing:
        row.done_stage = record.before(i).stage + 1
        s.unlist(row, record.batch.batch)
        if row.done_stage == len(row.path):
            raise InvariantViolation(
                f"row {row.row:#x} came back from its last stage without an end"
            )
        s.say(row, Kind.MOVED, row.done_stage)
    if row in s.trials and not row.on_trial:
        s.trials.discard(row)
        s.say(row, Kind.PROGRESS)


def _put_back(s: State, row: RowRecord, before: Place) -> None:
    """Back to before the step. Steps of the row after it, in flight too, come back as well."""
    s.counts["returned_rows"] += 1
    row.returning = True
    if before < row.place:
        leaving = row.life.state is RowState.LEAVING
        if not leaving and before.stage != row.stage:
            s.leave_stage(row)
        row.stage, row.consumed, row.produced = before
    row.life.on(RowEvent.RETURN, s.step)


def _refused(s: State, record: StepRecord, refusal: Refusal) -> None:
    """The youngest row is held and the rest go on without it."""
    live = [r for r in record.rows if not r.ended and r.life.state is not RowState.LEAVING]
    pool = record.rows[0].pool
    pool.may_retry = record.step <= pool.freed_after  # what was freed before it did not help
    if live:
        victim = max(live, key=lambda r: r.age)
        victim.refusal = dict(refusal.error)
        s.hold_for_space(victim)


def _settle(s: State, rows: Iterable[RowRecord]) -> None:
    """Rows with nothing in flight any more: leave if they were asked to, or may be tried again."""
    again: list[int] = []
    for row in rows:
        if row.in_flight or row.ended:
            continue
        if row.life.state is RowState.LEAVING:
            s.end(row, RowEvent.LEFT, Kind.LEFT)
        elif row.returning:
            row.returning = False
            again.append(row.row)
    if again:
        s.decisions.append(Unblock(tuple(again)))
