"""What must hold between any two events; tests check after each, the worker when idle."""

from protocol.errors import InvariantViolation
from worker.micro_scheduler.records import RowRecord
from worker.micro_scheduler.row_lifecycle import RowState
from worker.micro_scheduler.state import State


def _story(row: RowRecord) -> str:
    return "\n  ".join(["", *row.life.story()])


def check(s: State) -> None:
    """Raises `InvariantViolation` with the numbers."""
    if len(s.flights) > s.depth:
        raise InvariantViolation(f"{len(s.flights)} steps in flight, depth is {s.depth}")
    flying: dict[int, int] = {}
    for record in s.flights.values():
        numbers = [r.row for r in record.rows]
        if len(set(numbers)) != len(numbers):
            raise InvariantViolation(f"step {record.step} has a row twice: {numbers}")
        for n in numbers:
            flying[n] = flying.get(n, 0) + 1
    for number, row in s.rows.items():
        if row.in_flight != flying.pop(number, 0) + row.closing:
            raise InvariantViolation(
                f"row {number:#x}: {row.in_flight} in flight by its own{_story(row)}"
            )
        if not row.emitted <= row.produced <= row.max_steps:
            raise InvariantViolation(
                f"row {number:#x}: {row.emitted} done, {row.produced} planned, "
                f"{row.max_steps} allowed{_story(row)}"
            )
        if row.ended and not row.in_flight:
            raise InvariantViolation(f"row {number:#x} ended and was not removed{_story(row)}")
        if (row.life.state is RowState.HELD) != (row.no_space or row.stalled) and not (
            row.ended or row.life.state is RowState.LEAVING
        ):
            raise InvariantViolation(
                f"row {number:#x}: held without a cause, or not held{_story(row)}"
            )
    if flying:
        raise InvariantViolation(f"steps in flight hold rows that are gone: {sorted(flying)}")
    for batch in s.batches.values():
        for row in batch.rows.values():
            if row.ended or s.rows.get(row.row) is not row:
                raise InvariantViolation(f"batch {batch.batch} lists row {row.row:#x}, which ended")
        if not batch.standing and not batch.rows:
            raise InvariantViolation(f"one-shot batch {batch.batch} is done and was kept")
