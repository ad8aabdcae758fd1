"""Which batch steps next, with which rows (rule 5, trials, held rows)."""

from worker.micro_scheduler import space
from worker.micro_scheduler.batch_lifecycle import BatchEvent, BatchState
from worker.micro_scheduler.decisions import Ingest, PlannedStep
from worker.micro_scheduler.membership import park_or_unpark
from worker.micro_scheduler.records import BatchRecord, RowRecord, StepRecord
from worker.micro_scheduler.row_lifecycle import RowEvent, RowState
from worker.micro_scheduler.state import State

Choice = tuple[BatchRecord, list[RowRecord]]


def plan(s: State) -> None:
    """Submit steps while there is something to step and room in flight."""
    space.make_room(s)
    while len(s.flights) < s.depth:
        choice = _choose(s)
        if choice is None:
            return
        _submit(s, *choice)


def _choose(s: State) -> Choice | None:
    trial = _trial_rules(s)
    if trial and any(not f.trial for f in s.flights.values()):
        return None  # the others' last steps drain first
    retry = space.retry(s, trial)
    if retry is not None:
        return retry
    for batch in sorted(s.batches.values(), key=lambda b: _order(s, b)):
        rows = _ready(batch, trial)
        if rows:
            return batch, rows
    return None


def _order(s: State, b: BatchRecord) -> tuple[int, bool, int]:
    """Priority; at equal priority the kind that did not step last; then first come, or, among
    standing batches, longest waited."""
    same_kind = s.last_kind.get(b.priority) is b.standing
    return -b.priority, same_kind, b.last_step if b.standing else b.age


def _ready(batch: BatchRecord, trial: bool) -> list[RowRecord]:
    if batch.life.state is BatchState.PARKED:
        return []
    if batch.standing and not trial:
        # Running rows first: this is every row of every step.
        return [
            r
            for r in batch.rows.values()
            if (r.life.state is RowState.RUNNING and r.produced < r.max_steps) or r.may_step
        ]
    number = batch.batch
    return [
        r
        for r in batch.rows.values()
        if r.may_step and r.batch == number and (not trial or r.on_trial)
    ]


def _trial_rules(s: State) -> bool:
    """True while rows on trial step: nothing else steps beside them (rule 16)."""
    if any(f.trial for f in s.flights.values()):
        return True
    return any(
        (r.may_step or (r.pool.may_retry and r.may_retry)) and s.stepping_batch(r) is not None
        for r in s.trials
    )


def _submit(s: State, batch: BatchRecord, rows: list[RowRecord]) -> None:
    s.step += 1
    planned = PlannedStep(s.step, batch.batch, batch.node, batch.walk, [r.row for r in rows])
    record = StepRecord(planned, batch, bool(s.trials) and all(r.on_trial for r in rows), rows)
    batch.life.on(BatchEvent.STEP, s.step)
    batch.steps += 1
    batch.last_step = s.step
    s.last_kind[batch.priority] = batch.standing
    planned.positions = [r.consumed for r in rows]
    planned.outputs = [r.start + r.produced for r in rows]
    for row in rows:
        row.in_flight += 1
        if row.life.state is not RowState.RUNNING or batch.node not in row.nodes:
            _enter_step(s, row, batch.node)
    if batch.standing:
        _advance_standing(rows, planned)
        park_or_unpark(s, batch)
    else:
        for row in rows:
            _advance_one_shot(s, row, planned)
    s.flights[s.step] = record
    s.decisions.append(planned)


def _enter_step(s: State, row: RowRecord, node: str) -> None:
    row.life.on(RowEvent.STEP, s.step)
    if node not in row.nodes:
        row.nodes.add(node)
        s.decisions.append(Ingest(row.row, node))


def _advance_standing(rows: list[RowRecord], planned: PlannedStep) -> None:
    for row in rows:
        row.consumed += 1
        row.produced += 1
    planned.spans = [(0, 0)] * len(rows)
    planned.samples = [True] * len(rows)


def _advance_one_shot(s: State, row: RowRecord, planned: PlannedStep) -> None:
    """Only the last one-shot stage yields an output. The next stage is entered at once: its input
    feeds back on the device, so nobody waits for this step's result."""
    tokens = row.path[row.stage][1]
    planned.spans.append((row.consumed, row.consumed + tokens))
    row.consumed += tokens
    row.stage += 1
    samples = row.stage == len(row.path) or row.path[row.stage][1] == 0
    planned.samples.append(samples)
    row.produced += samples
    if row.stage < len(row.path):
        row.life.on(RowEvent.MOVE, s.step)
        s.enter_stage(row)
