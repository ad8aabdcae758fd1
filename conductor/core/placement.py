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


def fits_pool(worker: Worker, model: str, pages: int) -> bool:
    """Promises never pass the pool, so a worker that keeps them never runs out of pages."""
    spec = worker.specs[model]
    return not spec.pages or worker.pages.get(model, 0) + pages <= spec.pages


def has_room(worker: Worker, request: Request, limits: LimitsConfig) -> bool:
    """Pages, a seat in the standing batch, and a one-shot batch that can go out at once."""
    spec = worker.specs[request.model]
    if not fits_pool(worker, request.model, pages_for(spec, request.total_tokens)):
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
