"""What the conductor's messages, and owners that stall or go, do to rows and batches."""

from typing import Any

from protocol.errors import InvalidRequest, PodiumError, RequestFailed, UnknownModel
from protocol.messages import (
    ROW_TRIAL,
    Close,
    Kind,
    Leave,
    Limit,
    Open,
    Owners,
    Reason,
    Row,
    Run,
)
from worker.micro_scheduler.batch_lifecycle import BatchEvent
from worker.micro_scheduler.decisions import Attach, CloseEmpty, Say
from worker.micro_scheduler.events import EmptyClosed, OwnerGone, OwnerStalled
from worker.micro_scheduler.records import BatchRecord, RowRecord
from worker.micro_scheduler.row_lifecycle import RowEvent, RowState
from worker.micro_scheduler.state import State
from worker.micro_scheduler.stops import stop_ids

WORD = 4  # bytes of one input token


def opened(s: State, m: Open) -> None:
    known = s.batches.get(m.batch)
    if known is not None:
        known.life.on(BatchEvent.OPEN_AGAIN, s.step)
    batch = BatchRecord(m.batch, m.node, m.walk, m.priority, True, s.next_age(), m.limit)
    s.batches[m.batch] = batch
    park_or_unpark(s, batch)
    for row in s.awaiting.pop(m.batch, ()):
        s.enter_stage(row)


def park_or_unpark(s: State, batch: BatchRecord) -> None:
    at_limit = batch.limit is not None and batch.steps >= batch.limit
    batch.life.on(BatchEvent.PARK if at_limit else BatchEvent.UNPARK, s.step)


def limited(s: State, m: Limit) -> None:
    batch = s.batches.get(m.batch)
    if batch is None or not batch.standing:
        s.counts["strays"] += 1
        return
    batch.limit = m.last_step
    park_or_unpark(s, batch)


def closed(s: State, m: Close) -> None:
    batch = s.batches.get(m.batch)
    if batch is None:
        s.counts["strays"] += 1
        return
    batch.life.on(BatchEvent.CLOSE_BUSY if batch.rows else BatchEvent.CLOSE, s.step)
    del s.batches[m.batch]


def ran(s: State, m: Run) -> None:
    """A one-shot batch comes whole; a standing batch gains rows."""
    batch = s.batches.get(m.batch)
    if batch is not None and not batch.standing:
        batch.life.on(BatchEvent.OPEN_AGAIN, s.step)
    listed = batch or BatchRecord(m.batch, m.node, m.walk, m.priority, False, s.next_age())
    for entry in m.rows:
        row = s.rows.get(entry) if isinstance(entry, int) else _arrive(s, entry, m)
        if row is None or row.ended or row.life.state is RowState.LEAVING:
            continue  # rule 3: its later stages are void
        if not listed.standing and any(number == m.batch for number, _ in row.path):
            listed.rows[row.row] = row
        elif not listed.standing:
            s.counts["strays"] += 1
    if not listed.standing and listed.rows:
        s.batches[m.batch] = listed
        s.awaiting.pop(m.batch, None)  # rows whose stage it is are listed now


def _arrive(s: State, m: Row, run: Run) -> RowRecord | None:
    """A row's first mention. None: it ended at once."""
    model = run.node.rpartition("/")[0]
    if m.row in s.rows:
        s.counts["strays"] += 1
        return None
    start = (m.base[0] if m.base else 0) + len(m.handed)
    try:
        stops = _validate(s, m, model)
    except PodiumError as e:
        s.decisions.append(Say(m.row, Kind.FAILED, start, {"error": e.to_wire()}))
        s.counts["ended"] += 1
        return None
    path = tuple((stage[0], stage[1]) for stage in m.path)
    trial = bool(m.flags & ROW_TRIAL)
    row = RowRecord(m.row, s.pools[model], m.owner, path, start, m.max_steps, trial)
    s.rows[m.row] = row
    s.decisions.append(Attach(m, model))
    over = _already_over(m, stops)
    if over is not None:
        row.closing = True
        row.in_flight = 1  # the frame: whatever comes meanwhile waits for it
        s.decisions.append(CloseEmpty(m.row, over))
        return None
    if trial:
        s.trials.add(row)
    if m.owner in s.stalled_owners:
        row.stalled = True
        s.hold(row)
    s.enter_stage(row)
    return row


def _validate(s: State, m: Row, model: str) -> frozenset[int]:
    if model not in s.models:
        raise UnknownModel(f"this worker has no model {model!r}", model=model)
    if m.owner not in s.owners:
        raise RequestFailed(f"owner {m.owner:#x} was not announced to this worker")
    tokens = m.inputs.get("tokens", b"")
    if not isinstance(tokens, bytes) or len(tokens) % WORD:
        raise InvalidRequest("inputs.tokens: a column of 4-byte token ids is expected")
    consumed = sum(n for _, n in m.path)
    if consumed and consumed != len(tokens) // WORD:
        raise InvalidRequest(
            f"the row's stages consume {consumed} tokens; it brings {len(tokens) // WORD}"
        )
    if any(n == 0 for _, n in m.path[:-1]):
        raise InvalidRequest("only the last stage of a path may be a standing batch")
    return stop_ids(m.params, s.models[model])


def _already_over(m: Row, stops: frozenset[int]) -> Reason | None:
    """Rule 11: the history that this row continues already meets its stop."""
    if m.handed:
        last: int | None = m.handed[-1]
    elif m.base and m.base[0] > 0:
        tokens: Any = m.inputs.get("tokens", b"")
        last = int.from_bytes(tokens[-WORD:], "little") if tokens else None
    else:
        last = None
    if last is not None and last in stops:
        return Reason.STOP
    return Reason.LENGTH if m.max_steps == 0 else None


def left(s: State, m: Leave) -> None:
    for number in m.row:
        row = s.rows.get(number)
        if row is not None:
            s.leave(row)


def empty_closed(s: State, e: EmptyClosed) -> None:
    row = s.rows.get(e.row)
    if row is None:
        return
    row.in_flight -= 1
    if row.ended:
        s.retire(row)
        return
    if e.end is None:
        s.end(row, RowEvent.FAIL, Kind.FAILED, {"error": e.error})
    else:
        s.end(row, RowEvent.FINISH, Kind.FINISHED, e.end.extra(), e.end.count)


def owner_stalled(s: State, e: OwnerStalled) -> None:
    (s.stalled_owners.add if e.stalled else s.stalled_owners.discard)(e.owner)
    for row in _rows_of(s, e.owner):
        row.stalled = e.stalled
        (s.hold if e.stalled else s.release)(row)


def owner_gone(s: State, e: OwnerGone) -> None:
    for row in _rows_of(s, e.owner):
        s.end(row, RowEvent.FAIL, Kind.FAILED, {"error": e.error})


def owners(s: State, m: Owners) -> None:
    """Owners come and go; what runs for one that is down leaves."""
    if m.up:
        s.owners.add(m.life)
        return
    s.owners.discard(m.life)
    s.stalled_owners.discard(m.life)
    for row in _rows_of(s, m.life):
        s.leave(row)


def _rows_of(s: State, owner: int) -> list[RowRecord]:
    return [r for r in s.rows.values() if r.owner == owner and not r.ended]
