"""Trials: which request of a crashed step was it? (rule 16)

All requests whose rows were live in the crash are suspects. They replay in groups, each alone on a
worker that holds nothing else, until every member is 4 tokens past its history: then the group is
acquitted. A group that crashes is halved; a single row that crashes is quarantined.

A request has 4 replays. Halving a group of 2^k needs k + 1 of them, so a group is never larger than
its members' remaining replays can still tell apart: 8 at first, and a guilty one is found, and its
neighbours saved, within the bound.
"""

from collections.abc import Iterable

from conductor.core import placement, rows
from conductor.core.records import PlacedRow, Request, Trial
from conductor.core.registry import Worker
from conductor.core.request_lifecycle import RequestState
from conductor.core.state import State

MAX_REPLAYS = 4
PROOF = 4  # tokens past its history that clear a suspect
PATIENCE = 5.0  # seconds for an empty worker to appear, before one is emptied for a trial


def accuse(s: State, suspects: Iterable[Request], halve: bool) -> None:
    """Group these rebased requests for trial. `halve`: they crashed together just now."""
    by_kind: dict[tuple[str, int], list[Request]] = {}
    for request in suspects:
        by_kind.setdefault((request.model, request.replays), []).append(request)
    for (model, replays), members in by_kind.items():
        n = len(members)
        size = min((n + 1) // 2 if halve else n, 1 << (MAX_REPLAYS - replays))
        groups = -(-n // size)
        for k in range(groups):
            part = members[k * n // groups : (k + 1) * n // groups]
            _await(s, Trial(model, dict.fromkeys(part), s.now))
    s.dirty = True


def _await(s: State, trial: Trial) -> None:
    for request in trial.members:
        request.trial = trial
    s.suspects.append(trial)


def waiting_alone(s: State) -> list[Request]:
    """Suspects that are a group of their own and could be placed."""
    alone = [next(iter(t.members)) for t in s.suspects if len(t.members) == 1]
    return [r for r in alone if r.state is RequestState.QUEUED]


def start_waiting(s: State) -> list[Worker]:
    """Place every group that has an empty worker: one without rows, and without unsettled ends,
    which a crash would take along. Returns workers that are being emptied for a group; they get no
    other rows meanwhile."""
    reserved: list[Worker] = []
    for trial in list(s.suspects):
        if any(r.state is not RequestState.QUEUED for r in trial.members):
            continue  # an owner has not told its history yet
        able = [
            w
            for w in s.registry.serving(trial.model)
            if w.trial is None
            and w not in reserved
            and placement.fits_alone(w, trial.members, trial.model, s.config.limits)
        ]
        if not able:
            _split_if_too_large(s, trial)
            continue
        worker = min(able, key=lambda w: (len(w.rows), len(w.stakes), w.name))
        if not worker.rows and not worker.stakes:
            _start(s, trial, worker)
        elif not worker.rows or s.now - trial.since >= PATIENCE:
            reserved.append(worker)
    return reserved


def _start(s: State, trial: Trial, worker: Worker) -> None:
    s.suspects.remove(trial)
    trial.worker, worker.trial = worker, trial
    s.count("trials")
    for request in trial.members:
        rows.place(s, request, worker)
    s.out.note("info", "trial", worker=worker.name, rows=len(trial.members))


def _split_if_too_large(s: State, trial: Trial) -> None:
    """A group that no worker of the model could hold even when empty goes in two parts."""
    workers = s.registry.serving(trial.model)
    members = list(trial.members)
    if len(members) < 2 or not workers:
        return
    if any(placement.fits_alone(w, members, trial.model, s.config.limits) for w in workers):
        return
    s.suspects.remove(trial)
    half = len(members) // 2
    for part in (members[:half], members[half:]):
        _await(s, Trial(trial.model, dict.fromkeys(part), trial.since))
    s.dirty = True


def progressed(s: State, row: PlacedRow) -> None:
    """The row reached `row.position`."""
    request = row.request
    trial = request.trial
    if trial is None or request.row is not row:
        return
    if row.position >= len(request.history) + PROOF:
        trial.passed.add(request)
        _conclude(s, trial)


def leave(s: State, request: Request) -> None:
    """The request is no suspect any more: it ended, or is gone."""
    trial = request.trial
    if trial is None:
        return
    request.trial = None
    del trial.members[request]
    trial.passed.discard(request)
    _conclude(s, trial)


def _conclude(s: State, trial: Trial) -> None:
    if len(trial.passed) < len(trial.members):
        return
    s.count("acquitted", len(trial.passed))
    dissolve(trial)
    if trial in s.suspects:
        s.suspects.remove(trial)
    s.dirty = True


def dissolve(trial: Trial) -> None:
    """No member is on trial in it any more."""
    for request in trial.members:
        request.trial = None
    trial.members.clear()
    trial.passed.clear()
    if trial.worker is not None:
        trial.worker.trial = None
        trial.worker = None
