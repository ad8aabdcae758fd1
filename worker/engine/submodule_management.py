"""SubmoduleManagement: what the engine keeps per node."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from worker.api.inputs import NodeInputs, SubmoduleStep
from worker.api.states import LazyRequestStates
from worker.api.submodule import NodeSubmodule
from worker.resources.base import Resource


@dataclass(slots=True)
class StandingRows:
    """What a walk whose inputs feed back on the device answered for these rows (E22)."""

    request_ids: list[int]
    inputs: dict[int, NodeInputs]
    running_batched: bool
    spans: list[int]
    declared: SubmoduleStep | None = None
    is_declared: bool = False


@dataclass(slots=True, eq=False)
class SubmoduleManagement:
    """`name` is "model/node"; `resources` are in dependency order; `requests` may use the node."""

    name: str
    node: str
    submodule: NodeSubmodule
    resources: dict[str, Resource]
    states: LazyRequestStates
    walks: tuple[str, ...]
    device: torch.device
    requests: set[int] = field(default_factory=set[int])
    standing: dict[str, StandingRows] = field(default_factory=dict[str, StandingRows])
    publishers: dict[str, Resource] = field(default_factory=dict[str, Resource])

    def modes(self) -> AbstractContextManager[Any]:
        """This node's autocast, for the calling thread alone (E10)."""
        dtype = self.submodule.autocast_dtype
        if dtype is None:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=dtype)

    def remove_request(self, request_id: int) -> None:
        """Forget a request here: its state and whatever the submodule keeps. Idempotent."""
        self.requests.discard(request_id)
        try:
            self.states.remove(request_id)
        finally:
            self.submodule.remove_request(request_id)
