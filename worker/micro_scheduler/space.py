"""A pool without room: who is held, who is tried again, who gives way. One pool a model.

The youngest row of a refused step is held. Pages that come free go to the oldest held row, in a
step of its own, and until it has them no younger row begins. What already runs goes on: it ends, or
is held too. When nothing of the pool steps, the youngest row that has pages is preempted. So the
oldest row of a pool always comes further, and whatever all older rows leave room for is never
preempted.
"""

from protocol.errors import CannotFit
from protocol.messages import Kind
from worker.micro_scheduler.records import BatchRecord, PoolRecord, RowRecord
from worker.micro_scheduler.row_lifecycle import RowEvent
from worker.micro_scheduler.state import State


def make_room(s: State) -> None:
    """Call before steps are chosen."""
    for pool in s.pools.values():
        if pool.waiting:
            _hold_late_comers(s, pool)
            while _stuck(s, pool) and _unstick(s, pool):
                pass


def retry(s: State, trial: bool) -> tuple[BatchRecord, list[RowRecord]] | None:
    """The oldest held row of a pool that may have room, in a step of its own, so that a refusal
    sets back nobody else.

    One at a time: whether it got its pages decides about the next.
    """
    for pool in s.pools.values():
        if not pool.may_retry:
            continue
        pool.may_retry = bool(pool.waiting)
        if any(r.pool is pool and r.no_space for f in s.flights.values() for r in f.rows):
            continue
        for row in _held(s, pool):
            batch = s.stepping_batch(row)
            if batch is not None and (not trial or row.on_trial):
                return batch, [row]
    return None


def _held(s: State, pool: PoolRecord) -> list[RowRecord]:
    """Rows held for space that could be tried, oldest first."""
    held = [r for r in pool.waiting.values() if r.may_retry and s.stepping_batch(r) is not None]
    return sorted(held, key=lambda r: r.age)


def _hold_late_comers(s: State, pool: PoolRecord) -> None:
    """A row that would begin while an older one waits for pages would take them from it."""
    oldest = min(r.age for r in pool.waiting.values())
    for row in s.rows.values():
        if row.pool is pool and row.age > oldest and row.consumed == 0 and row.may_step:
            s.hold_for_space(row)


def _stuck(s: State, pool: PoolRecord) -> bool:
    """Nothing of the pool steps, is about to, or has pages that came free."""
    if pool.may_retry or any(f.rows[0].pool is pool for f in s.flights.values()):
        return False
    return not any(
        r.pool is pool and r.may_step and s.stepping_batch(r) is not None for r in s.rows.values()
    )


def _unstick(s: State, pool: PoolRecord) -> bool:
    """Make the oldest held row progress at the cost of the youngest that has pages.

    If no younger one has any, it is tried once more, and refused if even then it does not fit.
    False: an older row has pages and waits for something else; its end brings a retry.
    """
    held = _held(s, pool)
    if not held:
        return False
    oldest = held[0]
    holders = [r for r in s.rows.values() if r.pool is pool and r is not oldest and r.consumed > 0]
    younger = [r for r in holders if r.age > oldest.age]
    if younger:
        s.counts["preempted"] += 1
        s.end(max(younger, key=lambda r: r.age), RowEvent.PREEMPT, Kind.PREEMPTED)
    elif holders:
        return False
    elif oldest.tried_alone:
        error = oldest.refusal or CannotFit("no room for this request").to_wire()
        s.end(oldest, RowEvent.REFUSE, Kind.REFUSED, {"error": error})
    else:
        oldest.tried_alone = True
        pool.may_retry = True
    return True
