"""What can happen to one request, from `Submit` to `Closed`."""

from conductor.core import admission, rows, trials
from conductor.core.records import ProposedEnd, Request
from conductor.core.registry import Owner
from conductor.core.request_lifecycle import RequestEvent, RequestState
from conductor.core.state import State
from protocol.errors import (
    CannotFit,
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    PodiumError,
    Unavailable,
    WorkerLost,
)
from protocol.messages import Closed, History, Reason, Submit

LAST_ATTEMPT = 0xFFFF
LAST_PREEMPTION = 16  # of one that no worker had to preempt: something is wrong with them


def submit(s: State, owner: Owner, message: Submit) -> None:
    """Admit it to the queue, or propose its rejection; either way it is open until `Closed`."""
    if message.stream in owner.streams:
        s.count("duplicate_submits")
        return
    known = owner.resubmits.pop(message.stream, 0)
    if not 1 <= message.attempt <= LAST_ATTEMPT or known >= LAST_ATTEMPT:
        s.drop()
        return
    request = Request(
        owner=owner,
        stream=message.stream,
        attempt=max(message.attempt, known),
        model=message.model,
        prompt=b"",
        params={},
        max_tokens=0,
        priority=message.priority,
        tenant=message.tenant,
        replay=message.replay,
        sequence=s.sequences.next(),
    )
    owner.streams[message.stream] = request
    s.submitted += 1
    s.open += 1
    resubmitted = known > 0 or message.attempt > 1
    try:
        _admit(s, request, message, resubmitted)
    except PodiumError as error:
        s.count("rejected")
        propose_end(s, request, Reason.REJECTED, error)
        return
    deadline = message.deadline_ms or s.config.limits.default_deadline_ms
    if deadline:
        s.deadlines.set(request, s.now + deadline / 1000)
    if resubmitted:  # an earlier attempt may have sent frames; only the owner knows (rule 20)
        rebase(s, request, "submitted again", replay=False)
    else:
        _enqueue(s, request)


def _admit(s: State, request: Request, message: Submit, resubmitted: bool) -> None:
    if s.fatal:
        raise Unavailable(f"the daemon is stopping: {s.fatal}")
    if s.draining:
        raise Unavailable("draining: no new requests are taken")
    spec = s.registry.models.get(message.model)
    if spec is None:
        if message.model in s.config.models:
            raise Unavailable(
                f"starting: no worker serves model {message.model!r} yet", retry_after=1
            )
        raise admission.unknown_model(message.model, list(s.config.models))
    seed = admission.draw_seed(s.seed, request.owner.life, request.stream)
    pool = s.registry.largest_pool(message.model)
    admitted = admission.check(message, spec, pool, s.config.limits, seed)
    if not resubmitted:  # those were admitted before; refusing them now would end running streams
        s.queue.refuse_if_full(len(admitted.prompt) // 4, s.config.limits, s.now)
    request.prompt, request.max_tokens = admitted.prompt, admitted.max_tokens
    request.params = admitted.params


def _enqueue(s: State, request: Request) -> None:
    s.queue.push(request)
    s.dirty = True


def history(s: State, owner: Owner, message: History) -> None:
    """The owner's answer to `Rebase`: the request may be placed again."""
    request = owner.streams.get(message.stream)
    if (
        request is None
        or request.state is not RequestState.REBASING
        or request.attempt != message.attempt
    ):
        s.drop()
        return
    if len(message.tokens) > request.max_tokens:
        error = InvalidRequest(
            f"the history has {len(message.tokens)} tokens, max_tokens is {request.max_tokens}"
        )
        propose_end(s, request, Reason.FAILED, error)
        return
    request.history = message.tokens
    request.counts = list(message.counts)
    request.lifecycle.on(RequestEvent.HISTORY, len(message.tokens))
    s.count("replayed")
    if request.trial is None:
        _enqueue(s, request)
    else:
        s.dirty = True


def closed(s: State, owner: Owner, message: Closed) -> None:
    for stream, value in zip(message.stream, message.reason, strict=True):
        request = owner.streams.get(stream)
        if request is None:
            s.drop()
            continue
        try:
            reason = Reason(value)
        except ValueError:
            reason = Reason.NONE
        gone(s, request, Reason.FAILED if reason is Reason.NONE else reason)


def gone(s: State, request: Request, reason: Reason) -> None:
    """Its terminal event is written: count it once, and free what it holds."""
    request.lifecycle.on(RequestEvent.CLOSED, reason.name)
    _stop_work(s, request)
    del request.owner.streams[request.stream]
    s.open -= 1
    s.closed[reason] = s.closed.get(reason, 0) + 1


def propose_end(
    s: State, request: Request, reason: Reason, error: PodiumError | None, tell: bool = True
) -> None:
    """A failing `End`, which closes at once. Nothing of the request goes on here."""
    detail = error.to_wire() if error is not None else {}
    propose_end_detail(s, request, reason, detail, tell)


def propose_end_detail(
    s: State, request: Request, reason: Reason, detail: dict[str, object], tell: bool = True
) -> None:
    request.lifecycle.on(RequestEvent.FAIL, reason.name)
    _stop_work(s, request)
    request.end = ProposedEnd(reason, [], detail)
    if tell:
        s.out.end(request)


def finish(s: State, request: Request, reason: Reason, counts: list[int], closed: bool) -> None:
    """The walk is done. `closed`: the worker's last frame closed the stream, nothing to propose."""
    request.lifecycle.on(RequestEvent.DONE, reason.name)
    trials.leave(s, request)
    if not closed:
        request.end = ProposedEnd(reason, counts, {})
        s.out.end(request)


def settled(s: State, request: Request) -> None:
    """All its frames are acknowledged: losing the worker loses nothing (rule 14)."""
    if request.row is not None and request.row.worker.stakes.pop(request.row.id, None):
        s.dirty = s.dirty or bool(s.suspects)  # a trial waits for workers that owe nothing


def _stop_work(s: State, request: Request) -> None:
    settled(s, request)
    row, request.row = request.row, None
    if row is not None:
        rows.leave(s, row)
    if s.queue.discard(request):
        s.dirty = True  # the next in line may fit where this one did not
    s.deadlines.clear(request)
    trials.leave(s, request)


def rebase(s: State, request: Request, why: str, *, replay: bool) -> bool:
    """Raise the attempt and ask the owner for its history (rules 9 and 15). `replay`: it counts as
    one of the at most 4. False where the request ends instead. A suspect stays one, on its own."""
    settled(s, request)
    row, request.row = request.row, None
    if row is not None:
        rows.leave(s, row)
    suspect = request.trial is not None
    trials.leave(s, request)
    if replay:
        request.replays += 1
    if (
        request.replay == "never"
        or request.replays > trials.MAX_REPLAYS
        or request.attempt >= LAST_ATTEMPT
    ):
        allowed = 0 if request.replay == "never" else trials.MAX_REPLAYS
        error = WorkerLost(
            f"{why}; the request may be replayed {allowed} times", retryable=True, replays=allowed
        )
        propose_end(s, request, Reason.WORKER_LOST, error)
        return False
    request.attempt += 1
    request.lifecycle.on(RequestEvent.REBASE, why)
    request.end = None
    s.count("rebased")
    s.out.rebase(request)
    if suspect:
        trials.accuse(s, [request], halve=False)
    return True


def preempted(s: State, request: Request) -> None:
    """A worker had no room for it. It is computed again, prompt and history; after a few times,
    only where all of it fits (`placement.may_be_preempted`)."""
    request.preemptions += 1
    s.count("preempted")
    if request.preemptions > LAST_PREEMPTION:
        error = Overloaded(f"preempted {request.preemptions} times", retry_after=1)
        propose_end(s, request, Reason.FAILED, error)
        return
    rebase(s, request, "preempted", replay=False)


def pass_deadlines(s: State) -> None:
    for request in s.deadlines.take_due(s.now):
        where = request.state.name.lower()
        error = DeadlineExceeded(f"the deadline passed while the request was {where}")
        propose_end(s, request, Reason.DEADLINE, error)


def end_all(s: State, reason: Reason, error: PodiumError) -> None:
    for owner in s.registry.owners.values():
        for request in owner.streams.values():
            if request.state is not RequestState.ENDING:
                propose_end(s, request, reason, error)


def end_if_it_never_fits(s: State, request: Request) -> bool:
    """End a waiting request that no living worker of its model could hold, even when empty: pools
    differ between workers, and between incarnations of one."""
    pages, page_tokens = s.registry.largest_pool(request.model)
    if not pages or request.total_tokens <= pages * page_tokens:
        return False
    if not s.registry.serving(request.model):
        return False  # the next incarnation will tell
    error = CannotFit(
        f"{request.total_tokens} tokens of prompt and output never fit: the largest KV pool of"
        f" model {request.model!r} now holds {pages * page_tokens}",
        tokens=request.total_tokens,
        pool_tokens=pages * page_tokens,
    )
    propose_end(s, request, Reason.FAILED, error)
    return True
