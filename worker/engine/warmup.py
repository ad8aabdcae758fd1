"""Warm-up: every node and walk runs once for real, so that a first request pays for no first use
and a model that can't step fails before the worker says it is ready."""

from typing import Any, Protocol

from protocol.errors import Bug
from protocol.graph import Walk
from worker.api.inputs import RequestInfo
from worker.api.model import LoadedModel
from worker.engine.executing_batch import ExecutingBatch

REQUEST = -1
"""Ids below 0 are never a client's."""

PROMPT = (0, 0)
PARAMS: tuple[dict[str, Any], ...] = (
    {"max_tokens": 2},
    {"max_tokens": 2, "temperature": 1.0, "top_k": 2, "top_p": 0.5},
)


class Stepper(Protocol):
    """What warm-up needs of an engine."""

    def add_request(self, node: str, request_id: int, params: dict[str, Any], /) -> None: ...

    def remove_request(self, request_id: int, /) -> None: ...

    def prepare_batch(self, batch: ExecutingBatch, /) -> None: ...

    def exec_and_postprocess(self, batch: ExecutingBatch, /) -> None: ...


def warm_up(engine: Stepper, name: str, loaded: LoadedModel) -> None:
    """Walk the graph with a greedy and then a sampling request. Raises what a step raised."""
    for params in PARAMS:
        try:
            position = 0
            for walk in _in_walking_order(loaded):
                tokens = () if walk.standing else PROMPT
                for node in walk.nodes():
                    engine.add_request(f"{name}/{node}", REQUEST, params)
                    info = RequestInfo(REQUEST, walk.name, params, tokens, position)
                    _step(engine, f"{name}/{node}", info)
                position += max(1, len(tokens))
        finally:
            engine.remove_request(REQUEST)


def _in_walking_order(loaded: LoadedModel) -> list[Walk]:
    """The entry walk, what follows it, then the rest."""
    order: list[Walk] = []
    name: str | None = loaded.graph.entry
    while name is not None and all(w.name != name for w in order):
        order.append(loaded.graph.walk(name))
        name = order[-1].then
    return order + [w for w in loaded.graph.walks if w not in order]


def _step(engine: Stepper, node: str, info: RequestInfo) -> None:
    batch = ExecutingBatch(
        step=0,
        batch=0,
        node_name=node,
        walk=info.walk,
        request_ids=[REQUEST],
        per_request_info={REQUEST: info},
    )
    engine.prepare_batch(batch)
    engine.exec_and_postprocess(batch)
    if batch.error is not None:
        raise batch.error
    for failed in batch.failed_requests.values():
        raise failed.error
    if batch.admit_error is not None:
        raise Bug(f"warm-up of {node!r} was refused: {batch.admit_error.detail}")
