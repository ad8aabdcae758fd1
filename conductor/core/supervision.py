"""Time: beats to peers, silence and hangs of peers, the end of a grace."""

from conductor.core import loss, requests
from conductor.core.commands import Drained, Send
from conductor.core.registry import Worker
from conductor.core.state import State
from conductor.core.worker_lifecycle import WorkerEvent, WorkerState
from protocol.errors import Unavailable
from protocol.messages import Beat, Exit, Reason

HANG_FACTOR = 5  # a step may last this many times its usual time
MEMORY = 0.9  # how slowly a worker's usual step time decays
EARLY = 0.001  # seconds that a timer may fire before its time without a beat being left out
CLOSING = 1.0  # seconds for owners to say Closed after a drain's grace


def beat(s: State, worker: Worker, message: Beat) -> None:
    """Take a worker's progress; a step that is far older than usual is a hang (promise P6)."""
    advanced = message.steps - worker.steps
    if advanced > 0:
        sample = (s.now - worker.advanced_at) / advanced
        worker.step_time = max(sample, MEMORY * worker.step_time + (1 - MEMORY) * sample)
        worker.steps, worker.advanced_at = message.steps, s.now
    elif not worker.rows:
        worker.advanced_at = s.now  # idle time is no step time
    worker.step_age = message.step_age_ms / 1000
    worker.load = message.load
    usual = max(worker.step_time, _announced_step_time(worker))
    limit = max(s.silence, HANG_FACTOR * usual)
    if advanced <= 0 and worker.rows and worker.step_age > limit:
        why = (
            f"a step has run for {worker.step_age:.1f} s; the limit is {limit:.1f} s"
            f" (its steps take {usual:.3f} s)"
        )
        loss.lose_worker(s, worker, why, charged=True, kill=True)


def _announced_step_time(worker: Worker) -> float:
    told = worker.load.get("step_ms")
    return told / 1000 if isinstance(told, int | float) and told >= 0 else 0.0


def tick(s: State) -> None:
    """Scans peers, never requests."""
    _forgive_own_absence(s)
    if s.next_beat is None or s.now >= s.next_beat - EARLY:
        s.next_beat = s.now + s.beat
        for peer in s.registry.peers():
            if peer.linked:
                s.out.follow(Send(peer.life, Beat()))
    for worker in list(s.registry.workers.values()):
        silent = s.now - (worker.last_heard if worker.linked else worker.down_since)
        if silent > s.silence:
            what = "silent" if worker.linked else "without a link"
            why = f"{what} for {silent:.1f} s"
            loss.lose_worker(s, worker, why, charged=False, kill=True)
        elif worker.state is WorkerState.DRAINING:
            _drain_worker(s, worker)
    for owner in list(s.registry.owners.values()):
        silent = s.now - (owner.last_heard if owner.linked else owner.down_since)
        if silent > s.silence:
            s.count("owners_lost")
            loss.lose_owner(s, owner, f"silent for {silent:.1f} s")
    if s.suspects:
        s.dirty = True  # their patience may have run out


def _forgive_own_absence(s: State) -> None:
    """A conductor that was stopped or starved finds everyone silent, with their messages still in
    its sockets. The time it was away counts against nobody."""
    if s.ticked_at is not None:
        away = s.now - s.ticked_at - s.beat
        if away > s.beat:
            for peer in s.registry.peers():
                peer.last_heard = min(s.now, peer.last_heard + away)
                peer.down_since = min(s.now, peer.down_since + away)
    s.ticked_at = s.now


# ---- drains


def worker_leaving(s: State, worker: Worker, grace_ms: int) -> None:
    worker.lifecycle.on(WorkerEvent.LEAVING, grace_ms)
    worker.drain_at = s.now + grace_ms / 1000
    s.registry.draining[worker.life] = worker
    s.out.note("info", "worker draining", worker=worker.name, rows=len(worker.rows))
    _drain_worker(s, worker)


def _drain_worker(s: State, worker: Worker) -> None:
    """At the end of its grace its rows move elsewhere; when none is left, it may exit."""
    if worker.drain_at is not None and s.now >= worker.drain_at:
        worker.drain_at = None
        for row_id, request in list(worker.stakes.items()):
            if row_id in worker.rows:
                requests.rebase(s, request, f"worker {worker.name} is leaving", replay=False)
    if not worker.rows and not worker.stakes and worker.linked and not worker.exit_sent:
        worker.exit_sent = True
        s.out.follow(Send(worker.life, Exit(0)))


def drain(s: State, grace_ms: int) -> None:
    """A second call may shorten the grace, never lengthen it."""
    ends = s.now + grace_ms / 1000
    if not s.draining:
        s.draining, s.drain_ends = True, ends
        s.out.note("info", "draining", grace_ms=grace_ms, open=s.open)
    elif s.drain_ends is not None:
        s.drain_ends = min(s.drain_ends, ends)


def pass_time(s: State) -> None:
    """What falls due whatever the event was: deadlines, and the end of a drain."""
    requests.pass_deadlines(s)
    if s.drain_ends is not None and s.now >= s.drain_ends:
        s.drain_ends = None
        s.give_up_at = s.now + CLOSING
        error = Unavailable("the daemon is stopping and its grace for open requests is over")
        requests.end_all(s, Reason.ABORTED, error)
    over = s.give_up_at is not None and s.now >= s.give_up_at
    if s.draining and not s.drained and (s.open == 0 or over):
        s.drained = True
        s.out.follow(Drained())


def next_due(s: State) -> float | None:
    due = [s.deadlines.next(), s.drain_ends]
    if not s.drained:
        due.append(s.give_up_at)
    if s.registry.workers or s.registry.owners:
        due.append(s.next_beat if s.next_beat is not None else s.now)
    due.extend(w.drain_at for w in s.registry.draining.values() if not w.exit_sent)
    return min((t for t in due if t is not None), default=None)
