"""Which worker a request goes to. Pure: reads the account, changes nothing."""

from collections.abc import Iterable

from conductor.core import batching, walk
from conductor.core.records import Request
from conductor.core.registry import Worker
from protocol.config import LimitsConfig
from protocol.graph import ModelSpec


def pages_for(spec: ModelSpec, tokens: int) -> int:
    """KV pages that hold this many tokens; 0 for a model without KV."""
    return -(-tokens // spec.page_tokens) if spec.page_tokens else 0


MAX_PREEMPTIONS = 4


def may_be_preempted(request: Request) -> bool:
    """Not one that may not be computed again, nor one that was preempted often enough."""
    return request.replay != "never" and request.preemptions < MAX_PREEMPTIONS


def most_pages(spec: ModelSpec, limits: LimitsConfig) -> int:
    """Pages of one pool that may be promised."""
    return int(spec.pages * limits.overcommit)


def fits_pool(worker: Worker, request: Request, limits: LimitsConfig) -> bool:
    """Promises may pass the pool by `overcommit`, no single one may.

    A worker that runs out preempts the youngest row. So a row that must not be preempted goes only
    where it fits beside everything placed before it: what comes later is younger.
    """
    spec = worker.specs[request.model]
    if not spec.pages:
        return True
    pages = pages_for(spec, request.total_tokens)
    most = most_pages(spec, limits) if may_be_preempted(request) else spec.pages
    return pages <= spec.pages and worker.pages.get(request.model, 0) + pages <= most


def has_room(worker: Worker, request: Request, limits: LimitsConfig) -> bool:
    """Pages, a seat in the standing batch, and a one-shot batch that can go out at once."""
    spec = worker.specs[request.model]
    if not fits_pool(worker, request, limits):
        return False
    path = walk.path(spec.graph, request.input_tokens, limits.prefill_tokens)
    priority = request.priority
    if path.standing is not None:
        seats = batching.cap(spec, path.standing, limits)
        if batching.standing_rows(worker, request.model, path.standing, priority) >= seats:
            return False
    if path.one_shot is None or batching.slots(worker, priority) > 0:
        return True
    return len(path.chunks) == 1 and (
        batching.joinable(worker, request.model, path.one_shot, priority, path.chunks[0])
        is not None
    )


def choose(request: Request, workers: Iterable[Worker], limits: LimitsConfig) -> Worker | None:
    """The one with the fewest promised pages, then rows, then by name; None where none has room."""
    return min(
        (w for w in workers if has_room(w, request, limits)),
        key=lambda w: (w.committed_pages, len(w.rows), w.name),
        default=None,
    )


def fits_alone(
    worker: Worker, requests: Iterable[Request], model: str, limits: LimitsConfig
) -> bool:
    """Whether this worker, once empty, holds all of them at once."""
    group = list(requests)
    spec = worker.specs[model]
    if spec.pages and sum(pages_for(spec, r.total_tokens) for r in group) > spec.pages:
        return False
    standing = walk.itinerary(spec.graph).standing
    return standing is None or len(group) <= batching.cap(spec, standing, limits)
