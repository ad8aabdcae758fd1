"""The micro-scheduler's whole state, and the few mutations that its parts share."""

from collections.abc import Mapping
from typing import Any

from protocol.messages import Kind
from worker.micro_scheduler.batch_lifecycle import BatchEvent, BatchState
from worker.micro_scheduler.decisions import Decision, Remove, Say
from worker.micro_scheduler.records import BatchRecord, PoolRecord, RowRecord, StepRecord
from worker.micro_scheduler.row_lifecycle import RowEvent, RowState


class State:
    """`models`: name → ids that end its streams. `depth`: most steps in flight."""

    def __init__(self, depth: int, models: Mapping[str, frozenset[int]]) -> None:
        self.depth = depth
        self.models = models
        self.pools = {name: PoolRecord(name) for name in models}
        self.rows: dict[int, RowRecord] = {}
        self.batches: dict[int, BatchRecord] = {}
        self.awaiting: dict[int, list[RowRecord]] = {}  # a standing batch not open yet → its rows
        self.flights: dict[int, StepRecord] = {}
        self.trials: set[RowRecord] = set()
        self.owners: set[int] = set()
        self.stalled_owners: set[int] = set()
        self.last_kind: dict[int, bool] = {}  # priority → the last step there was a standing one
        self.step = 0
        self.arrivals = 0
        self.decisions: list[Decision] = []
        self.counts = dict.fromkeys(
            ("ended", "refused_steps", "preempted", "strays", "returned_rows"), 0
        )

    def next_age(self) -> int:
        self.arrivals += 1
        return self.arrivals

    def say(
        self, row: RowRecord, kind: Kind, value: int | None = None, extra: Any | None = None
    ) -> None:
        row.told = row.emitted
        where = row.position if value is None else value
        self.decisions.append(Say(row.row, kind, where, extra))

    # ---- membership

    def enter_stage(self, row: RowRecord) -> None:
        """The row's planned stage changed: join its standing batch, or wait until it is open.

        A one-shot batch lists its rows itself.
        """
        number = row.batch
        if number is None:
            return
        batch = self.batches.get(number)
        if batch is None:
            self.awaiting.setdefault(number, []).append(row)
        elif batch.standing:
            batch.life.on(BatchEvent.JOIN, self.step)
            batch.rows[row.row] = row

    def leave_stage(self, row: RowRecord) -> None:
        """Undo `enter_stage`."""
        number = row.batch
        if number is None:
            return
        waiting = self.awaiting.get(number)
        if waiting is not None and row in waiting:
            waiting.remove(row)
            if not waiting:
                del self.awaiting[number]
        batch = self.batches.get(number)
        if batch is not None and batch.standing:
            batch.rows.pop(row.row, None)

    def stepping_batch(self, row: RowRecord) -> BatchRecord | None:
        """The batch that the row could step in now."""
        number = row.batch
        batch = None if number is None else self.batches.get(number)
        if batch is None or row.row not in batch.rows or batch.life.state is BatchState.PARKED:
            return None
        return batch

    def unlist(self, row: RowRecord, number: int) -> None:
        """The row is through with a one-shot batch."""
        batch = self.batches.get(number)
        if batch is None or batch.standing:
            return
        batch.rows.pop(row.row, None)
        if not batch.rows:
            batch.life.on(BatchEvent.EMPTY, self.step)
            del self.batches[number]

    # ---- ends

    def end(
        self, row: RowRecord, event: RowEvent, kind: Kind, extra: dict[str, Any] | None = None,
        value: int | None = None,
    ) -> None:  # fmt: skip
        """The one end of a row; its later stages are void (rules 2 and 3). An `error` in `extra`
        gets the row's last transitions as its `story`."""
        self.leave_stage(row)
        row.life.on(event, self.step)
        if extra is not None and extra.get("error") is not None:
            extra = {**extra, "error": {**extra["error"], "story": row.life.story()}}
        self.trials.discard(row)
        row.pool.waiting.pop(row.row, None)
        for number, _ in row.path:
            self.unlist(row, number)
        self.counts["ended"] += 1
        self.say(row, kind, value, extra)
        if row.in_flight == 0:
            self.retire(row)

    def retire(self, row: RowRecord) -> None:
        """No launched step contains the ended row any more: its pages may go (rule 6)."""
        del self.rows[row.row]
        self.decisions.append(Remove(row.row))
        row.pool.may_retry = True
        row.pool.freed_after = self.step

    def leave(self, row: RowRecord) -> None:
        if row.in_flight:
            row.life.on(RowEvent.LEAVE_LATER, self.step)
            self.leave_stage(row)
        elif not row.ended:
            self.end(row, RowEvent.LEAVE, Kind.LEFT)

    # ---- holding

    def hold(self, row: RowRecord) -> None:
        """Call after setting a cause. Reported once, however many causes there are."""
        if row.life.state in (RowState.WAITING, RowState.RUNNING):
            row.life.on(RowEvent.HOLD, self.step)
            self.say(row, Kind.HELD)

    def hold_for_space(self, row: RowRecord) -> None:
        if not row.ended and row.life.state is not RowState.LEAVING:
            row.pool.waiting[row.row] = row
            self.hold(row)

    def release(self, row: RowRecord) -> None:
        """Call after clearing a cause."""
        if row.life.state is RowState.HELD and not row.no_space and not row.stalled:
            row.life.on(RowEvent.RESUME, self.step)
            self.say(row, Kind.RESUMED)
