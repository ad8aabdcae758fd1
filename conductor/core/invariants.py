"""What is always true of the core between two events. Costs what exists: for tests, when idle."""

from collections import Counter

from conductor.core import batching, placement
from conductor.core.records import OneShotBatch, Request
from conductor.core.registry import Worker
from conductor.core.request_lifecycle import RequestState
from conductor.core.state import State
from protocol.errors import InvariantViolation


def check(s: State) -> None:
    """Raises `InvariantViolation`, naming what contradicts what, with the object's story."""
    requests = [r for o in s.registry.owners.values() for r in o.streams.values()]
    _accounts(s, requests)
    for request in requests:
        _request(s, request)
    waiting = {r for trial in s.suspects for r in trial.members}
    running = {r for w in s.registry.workers.values() if w.trial for r in w.trial.members}
    on_trial = {r for r in requests if r.trial is not None}
    _that(waiting | running == on_trial, "members of trials and requests on trial differ")
    _that(not waiting & running, "a request is in two trials")
    for request in on_trial:
        fits = (
            request.state is RequestState.ACTIVE
            if request in running
            else request.state in (RequestState.QUEUED, RequestState.REBASING)
        )
        what = f"request {request.stream:#x} is on trial in state {request.state.name}"
        _that(fits, what, request)
    for worker in s.registry.workers.values():
        _worker(s, worker)
        _memory(s, worker)
    if not requests:
        _at_rest(s)


def _that(holds: bool, what: str, request: Request | None = None) -> None:
    """`request`: whose story is told if it doesn't hold."""
    if not holds:
        story = request.lifecycle.story() if request is not None else []
        raise InvariantViolation(what + "".join(f"\n  {line}" for line in story))


def _accounts(s: State, requests: list[Request]) -> None:
    closed = sum(s.closed.values())
    _that(
        s.submitted == closed + s.open,
        f"{s.submitted} submitted, but {closed} closed and {s.open} open",
    )
    _that(s.open == len(requests), f"{s.open} counted open, {len(requests)} are")
    queued = s.queue.items()
    _that(s.queue.length == len(queued), f"queue length {s.queue.length}, {len(queued)} in it")
    tokens = sum(r.prompt_tokens for r in queued)
    _that(s.queue.tokens == tokens, f"{s.queue.tokens} queued tokens counted, {tokens} are")
    _that(len(s.deadlines) <= s.open, "a deadline outlived its request")


def _request(s: State, request: Request) -> None:
    state, row = request.state, request.row
    name = f"request {request.stream:#x} ({state.name})"
    in_queue = request in s.queue
    waits = request.trial is not None and request.trial.worker is None
    _that(
        (state is RequestState.QUEUED) == in_queue
        or (waits and not in_queue and state in (RequestState.QUEUED, RequestState.REBASING)),
        f"{name}: in the queue: {in_queue}, waits for trial: {waits}",
        request,
    )
    if state is RequestState.ACTIVE:
        _that(row is not None and not row.ended, f"{name} has no live row", request)
    if state in (RequestState.QUEUED, RequestState.REBASING, RequestState.ENDING):
        _that(row is None, f"{name} has a row", request)
    if row is not None:
        _that(
            row.request is request and row.attempt == request.attempt, f"{name}: stale row", request
        )
        _that(not row.leaving, f"{name}: its current row was asked to leave", request)
        worker = s.registry.workers.get(row.worker.life)
        _that(
            worker is row.worker or row.id not in row.worker.stakes,
            f"{name}: its worker {row.worker.name} is gone",
            request,
        )
        if not row.ended:
            staked = row.worker.stakes.get(row.id) is request
            _that(staked, f"{name}: losing its worker would go unnoticed", request)
    if state is RequestState.ENDING:
        _that(request not in s.deadlines, f"{name} still has a deadline", request)
        _that(request.end is not None, f"{name} has proposed no end", request)
    _that(request.state is not RequestState.GONE, f"{name} is still known", request)


def _worker(s: State, worker: Worker) -> None:
    name = f"worker {worker.name}"
    wanted: set[tuple[int, int]] = set()
    for row in worker.rows.values():
        _that(row.worker is worker and not row.ended, f"{name}: row {row.id} is not its own")
        request = row.request
        if request.row is row:
            key = (request.owner.life, request.stream)
            _that(key not in wanted, f"{name}: two wanted rows of stream {request.stream:#x}")
            wanted.add(key)
        else:
            _that(row.leaving, f"{name}: nobody wants row {row.id}, yet it was not asked to leave")
        trial = worker.trial
        _that(
            trial is None or row.leaving or row.request.trial is trial,
            f"{name}: row {row.id} steps beside a trial",
        )
    for row_id, request in worker.stakes.items():
        mine = request.row is not None and request.row.id == row_id
        _that(mine, f"{name}: a stake in a row that is not current", request)
    _batches(worker, name)


def _memory(s: State, worker: Worker) -> None:
    """Promises within bounds; and what may not be preempted fits beside all that is older."""
    name = f"worker {worker.name}"
    pages: Counter[str] = Counter()
    for row in sorted(worker.rows.values(), key=lambda row: row.id):
        pages[row.model] += row.pages
        pool, request = worker.specs[row.model].pages, row.request
        # One that was preempted meanwhile for the last time is leaving.
        safe = row.leaving or row.ended or placement.may_be_preempted(request)
        _that(
            safe or not pool or pages[row.model] <= pool,
            f"{name}: row {row.id} may not be preempted, and with what is older needs"
            f" {pages[row.model]} pages of {pool}",
            request,
        )
    for model in worker.pages.keys() | pages.keys():
        promised, spec = worker.pages.get(model, 0), worker.specs[model]
        most = placement.most_pages(spec, s.config.limits)
        _that(promised == pages[model], f"{name}: {promised} pages counted, {pages[model]} held")
        _that(not spec.pages or promised <= most, f"{name}: {promised} pages promised of {most}")


def _batches(worker: Worker, name: str) -> None:
    counted = sum(not b.returned for b in worker.ahead.values())
    _that(counted <= batching.AHEAD, f"{name}: {counted} one-shot batches are ahead")
    for batch in worker.ahead.values():
        _that(batch.sent and bool(batch.rows), f"{name}: batch {batch.id} is ahead for nothing")
    for batch in worker.planned:
        _that(not batch.sent and bool(batch.rows), f"{name}: planned batch {batch.id} is empty")
        tokens = sum(batch.rows.values())
        _that(batch.tokens == tokens <= batch.max_tokens, f"{name}: batch {batch.id}: {tokens}")
        _that(len(batch.rows) <= batch.max_rows, f"{name}: batch {batch.id} has too many rows")
    for batch in (*worker.ahead.values(), *worker.planned):
        for row in batch.rows:
            _that(worker.rows.get(row.id) is row, f"{name}: batch {batch.id} holds a dead row")
    for batch in worker.standing.values():
        _that(len(batch.rows) <= batch.max_rows, f"{name}: batch {batch.id} has too many rows")
        for row in batch.rows:
            _that(worker.rows.get(row.id) is row, f"{name}: batch {batch.id} holds a dead row")
    for row in worker.rows.values():
        for batch, _ in row.path[row.stage :]:
            if isinstance(batch, OneShotBatch) and not batch.sent and not row.leaving:
                _that(batch in worker.planned, f"{name}: batch {batch.id} will never be sent")


def _at_rest(s: State) -> None:
    """No request is open: nothing may wait, be promised, or be on trial."""
    _that(not s.queue.length and not s.suspects, "nothing is open, yet something waits")
    _that(not len(s.deadlines), "nothing is open, yet a deadline is set")
    for worker in s.registry.workers.values():
        idle = not worker.stakes and not worker.planned and worker.trial is None
        _that(idle, f"nothing is open, yet worker {worker.name} has a stake, a plan or a trial")
        _that(
            all(row.leaving for row in worker.rows.values()),
            f"nothing is open, yet worker {worker.name} has rows that may stay",
        )
