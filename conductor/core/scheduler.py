"""One pass: trials first, then the queue, then batches to workers. Runs when something changed."""

from conductor.core import placement, requests, rows, trials
from conductor.core.registry import Worker
from conductor.core.state import State


def schedule(s: State) -> None:
    """Place what can be placed. Costs placements and workers, not requests that wait."""
    while s.dirty:  # again where a pass ended or split something
        s.dirty = False
        _place(s)


def _place(s: State) -> None:
    reserved = _start_trials(s) if s.suspects else []
    blocked: set[str] = set()
    while (request := s.queue.first(blocked)) is not None:
        workers = [
            w for w in s.registry.serving(request.model) if w.trial is None and w not in reserved
        ]
        worker = placement.choose(request, workers, s.config.limits)
        if worker is None:
            if requests.end_if_it_never_fits(s, request):
                continue
            blocked.add(request.model)  # who came later, or matters less, doesn't overtake
            continue
        s.queue.discard(request)
        s.queue.placed(s.now)
        rows.place(s, request, worker)
    for worker in s.registry.workers.values():
        if worker.linked:
            rows.send_planned(s, worker)


def _start_trials(s: State) -> list[Worker]:
    for request in trials.waiting_alone(s):
        requests.end_if_it_never_fits(s, request)
    return trials.start_waiting(s)
