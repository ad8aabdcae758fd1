"""Losing a peer: what a worker took with it is placed anew, what an owner left is cleared."""

from conductor.core import requests, rows, trials
from conductor.core.commands import Forget, Kill, Send
from conductor.core.records import PlacedRow, Request
from conductor.core.registry import Owner, Worker
from conductor.core.state import State
from conductor.core.worker_lifecycle import WorkerEvent
from protocol.errors import Quarantined
from protocol.messages import Owners, Reason


def lose_worker(s: State, worker: Worker, why: str, *, charged: bool, kill: bool) -> None:
    """Rebase every request with a stake there (rule 14). `charged`: a crash or a hang inside a step
    makes suspects of the rows that could be in it (rule 16); a death from outside of none."""
    worker.lifecycle.on(WorkerEvent.LOST, why)
    s.count("workers_lost")
    s.out.drop_peer(worker.life)
    s.out.note(
        "warning",
        "worker lost",
        worker=worker.name,
        why=why,
        rows=len(worker.rows),
        charged=charged,
    )
    if kill:
        s.out.say(Kill(worker.life, why))
    _clear(s, worker, f"worker {worker.name} was lost: {why}", charged=charged)


def dismiss_worker(s: State, worker: Worker, reason: str) -> None:
    """It said `Bye`: as a death from outside, but nobody's fault."""
    worker.lifecycle.on(WorkerEvent.BYE, reason)
    s.out.note("info", "worker gone", worker=worker.name, reason=reason)
    _clear(s, worker, f"worker {worker.name} left: {reason}", charged=False)


def _clear(s: State, worker: Worker, why: str, *, charged: bool) -> None:
    s.registry.drop_worker(worker)
    s.out.say(Forget(worker.life))
    live = [row for row in worker.rows.values() if row.sent]
    wanted = [row.request for row in live if not row.leaving and row.request.row is row]
    trial = worker.trial
    guilty = _convicted(live, wanted) if charged and trial is not None else None
    suspects: dict[Request, None] = {}
    if charged:
        suspects = dict.fromkeys(r for r in wanted if r is not guilty)
    elif trial is not None:
        suspects = dict.fromkeys(r for r in wanted if r not in trial.passed)
    if trial is not None:
        trials.dissolve(trial)
    affected = list(worker.stakes.values())
    for row in list(worker.rows.values()):
        rows.end(s, row)
    if guilty is not None:
        s.count("quarantined")
        s.out.note("error", "request quarantined", stream=guilty.stream, replays=guilty.replays)
        error = Quarantined(
            f"the request crashed worker {worker.name} while it ran alone", replays=guilty.replays
        )
        requests.propose_end(s, guilty, Reason.QUARANTINED, error)
    for request in affected:
        if request is not guilty and not requests.rebase(s, request, why, replay=True):
            suspects.pop(request, None)
    trials.accuse(s, suspects, halve=charged)
    s.dirty = True


def _convicted(live: list[PlacedRow], wanted: list[Request]) -> Request | None:
    """The request of the single row that was there, if it was still on trial.

    A row that was asked to leave still steps, so with one beside it nobody is convicted.
    """
    if len(live) == 1 and len(wanted) == 1 and wanted[0].trial is not None:
        return wanted[0]
    return None


def lose_owner(s: State, owner: Owner, why: str) -> None:
    """Its open streams are closed as owner_lost, its rows leave, workers drop their link to it."""
    left = len(owner.streams)
    for request in list(owner.streams.values()):
        requests.gone(s, request, Reason.OWNER_LOST)
    s.registry.drop_owner(owner)
    s.out.drop_peer(owner.life)
    s.out.say(Forget(owner.life, owner_lost=True))
    s.out.note("info", "owner gone", owner=owner.name, why=why, open_streams=left)
    for worker in s.registry.workers.values():
        if worker.linked:
            s.out.follow(Send(worker.life, Owners(owner.life, owner.endpoint, False)))
