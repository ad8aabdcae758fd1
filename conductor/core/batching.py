"""Rows in batches: who sits where, what is ahead, and which batch a worker is sent next.

A standing batch exists once per (worker, node, walk, priority) and is joined through a row's path.
One-shot batches are planned whole and sent while fewer than `AHEAD` are ahead (rule 5). A long
prompt is cut into successive one-shot stages of one path; its later stages name the row by number.
"""

from __future__ import annotations

from collections.abc import Iterator

from conductor.core.records import OneShotBatch, PlacedRow, StandingBatch
from conductor.core.registry import Worker
from conductor.core.walk import WalkNode
from protocol.config import LimitsConfig
from protocol.graph import ModelSpec
from protocol.ids import Counter

AHEAD = 2
IDLE_STANDING = 8  # empty standing batches kept open per worker; priorities are the owners' choice


def cap(spec: ModelSpec, at: WalkNode, limits: LimitsConfig) -> int:
    """Most rows of a batch of that walk and node (E37)."""
    return min(limits.max_rows, spec.max_batch.get(f"{at.node}/{at.walk}", limits.max_rows))


def node_name(model: str, at: WalkNode) -> str:
    return f"{model}/{at.node}"


def standing_rows(worker: Worker, model: str, at: WalkNode, priority: int) -> int:
    batch = worker.standing.get((node_name(model, at), at.walk, priority))
    return len(batch.rows) if batch is not None else 0


def joinable(
    worker: Worker, model: str, at: WalkNode, priority: int, tokens: int
) -> OneShotBatch | None:
    """A planned batch of that kind with room; the newest, so that order of arrival holds."""
    for batch in reversed(worker.planned):
        kind = (batch.model, batch.node, batch.walk, batch.priority)
        if kind == (model, node_name(model, at), at.walk, priority):
            return batch if batch.has_room(tokens) else None
    return None


def slots(worker: Worker, priority: int) -> int:
    """How many more one-shot batches of this priority could be sent now."""
    before = sum(1 for b in worker.planned if b.priority >= priority)
    return AHEAD - len(worker.ahead) - before


def open_standing(
    worker: Worker,
    spec: ModelSpec,
    at: WalkNode,
    *,
    priority: int,
    limits: LimitsConfig,
    mint: Counter,
) -> tuple[StandingBatch, bool, StandingBatch | None]:
    """The standing batch, whether it must be opened, and one long empty that should be closed."""
    key = (node_name(spec.model, at), at.walk, priority)
    batch = worker.standing.get(key)
    if batch is not None:
        return batch, False, None
    idle = [b for b in worker.standing.values() if not b.rows]
    stale = None
    if len(idle) >= IDLE_STANDING:
        stale = min(idle, key=lambda b: (b.emptied_at, b.id))
        del worker.standing[(stale.node, stale.walk, stale.priority)]
    rows = cap(spec, at, limits)
    batch = StandingBatch(
        id=mint.next(),
        model=spec.model,
        node=key[0],
        walk=at.walk,
        priority=priority,
        max_rows=rows,
    )
    worker.standing[key] = batch
    return batch, True, stale


def plan_one_shot(
    row: PlacedRow,
    spec: ModelSpec,
    at: WalkNode,
    chunks: tuple[int, ...],
    *,
    limits: LimitsConfig,
    mint: Counter,
) -> None:
    """Give the row its one-shot stages. A prompt of one chunk shares a batch that has room."""
    worker, priority = row.worker, row.request.priority
    for tokens in chunks:
        batch = joinable(worker, spec.model, at, priority, tokens) if len(chunks) == 1 else None
        if batch is None:
            batch = OneShotBatch(
                id=mint.next(),
                model=spec.model,
                node=node_name(spec.model, at),
                walk=at.walk,
                priority=priority,
                max_rows=cap(spec, at, limits),
                max_tokens=limits.prefill_tokens,
            )
            worker.planned.append(batch)
        batch.rows[row] = tokens
        batch.tokens += tokens
        row.path.append((batch, tokens))


def take_next(worker: Worker) -> Iterator[OneShotBatch]:
    """Batches to send now, highest priority first, then oldest. Each is ahead once yielded."""
    while worker.planned and len(worker.ahead) < AHEAD:
        batch = min(worker.planned, key=lambda b: (-b.priority, b.id))
        worker.planned.remove(batch)
        batch.sent = True
        worker.ahead[batch.id] = batch
        yield batch


def advance(row: PlacedRow, stage: int) -> bool:
    """The row moved on to this stage of its path. False where the path has no such stage ahead."""
    if not row.stage <= stage < len(row.path):
        return False
    for batch, _ in row.path[row.stage : stage]:
        _unseat(row, batch)
    row.held = row.held and stage == row.stage
    row.stage = stage
    return True


def hold(row: PlacedRow) -> None:
    """A held row doesn't count as ahead, or a full pool would stop every prefill behind it."""
    row.held = True
    batch = row.path[row.stage][0]
    if isinstance(batch, OneShotBatch) and batch.sent:
        _unseat(row, batch)


def resume(row: PlacedRow) -> None:
    row.held = False
    batch, tokens = row.path[row.stage]
    if isinstance(batch, OneShotBatch) and batch.sent:
        batch.rows[row] = tokens
        batch.returned = batch.returned or batch.id not in row.worker.ahead
        row.worker.ahead[batch.id] = batch


def leave_planned(row: PlacedRow) -> None:
    """The row was asked to leave: batches that are still to be sent go without it."""
    for batch, _ in row.path[row.stage :]:
        if isinstance(batch, OneShotBatch) and not batch.sent:
            _unseat(row, batch)


def leave_all(row: PlacedRow, now: float) -> None:
    """The row ended: its later stages are void (rule 3)."""
    for batch, _ in row.path[row.stage :]:
        _unseat(row, batch, now)


def _unseat(row: PlacedRow, batch: OneShotBatch | StandingBatch, now: float = 0.0) -> None:
    if isinstance(batch, StandingBatch):
        batch.rows.discard(row)
        if not batch.rows:
            batch.emptied_at = now
        return
    tokens = batch.rows.pop(row, 0)
    if batch.sent:
        if not batch.rows:
            row.worker.ahead.pop(batch.id, None)
        return
    batch.tokens -= tokens
    if not batch.rows and batch in row.worker.planned:
        row.worker.planned.remove(batch)
