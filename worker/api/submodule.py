"""NodeSubmodule: the one class that a model author writes per node.

The engine calls, per step: `prepare_inputs` (each request) → `can_batch` → `declare_step` →
`preprocess` → `forward_batched` or `forward` → `postprocess` (each request), all on the GPU thread
and without reading a tensor's value; then, on the postprocess thread, `check_stop`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from worker.api.inputs import (
    ModelInputsFromEngine,
    NodeInputs,
    RequestInfo,
    StepContext,
    SubmoduleStep,
)
from worker.api.outputs import StepOutputs
from worker.api.states import PerRequestState


class NodeSubmodule(nn.Module):
    """One node of a model's graph. Override what the node needs; every default is usable."""

    #: None: no autocast. Else this node's autocast dtype, in eager and in replay alike (E10).
    autocast_dtype: torch.dtype | None = None
    #: `prepare_inputs` reads no value and may run ahead of its producer.
    prepares_without_values: bool = False
    #: Walks whose inputs feed back on the device, so that `prepare_inputs`, `can_batch` and
    #: `declare_step` depend on nothing but which rows there are: the engine asks once and keeps
    #: the answers while the rows stay the same (E22).
    steady_walks: frozenset[str] = frozenset()

    def bind_node_resources(self, resources: Mapping[str, Any]) -> None:
        """Take the node's resources by key, once. A key the node lacks raises KeyError (E5)."""

    def max_batch_size(self, walk: str) -> int | None:
        """Most rows this node can batch in `walk`; None is no cap (E37)."""
        return None

    def new_state(self, request_id: int) -> PerRequestState:
        return PerRequestState()

    def prepare_inputs(self, info: RequestInfo) -> NodeInputs | None:
        """One request's inputs for this step. None skips it; a raise fails it alone (E11)."""
        return NodeInputs(span=max(1, len(info.tokens)))

    def can_batch(self, walk: str, inputs: Sequence[NodeInputs]) -> bool:
        return True

    def declare_step(self, ctx: StepContext) -> SubmoduleStep | None:
        """What this step needs of each resource, over the padded rows. None: nothing (E15)."""
        return None

    def preprocess(
        self, engine: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, torch.Tensor]:
        """Collate rows into the forward's keyword tensors."""
        return {}

    def forward_batched(
        self, engine: ModelInputsFromEngine, **tensors: torch.Tensor
    ) -> StepOutputs:
        """All rows at once."""
        raise TypeError(f"{type(self).__name__} has no batched forward; its can_batch must say so")

    def forward(self, engine: ModelInputsFromEngine, **tensors: torch.Tensor) -> StepOutputs:
        """Exactly one request."""
        return self.forward_batched(engine, **tensors)

    def postprocess(
        self, info: RequestInfo, outputs: dict[str, list[torch.Tensor]]
    ) -> dict[str, list[torch.Tensor]]:
        """One request's outputs, still on the device; a raise fails it alone (E27)."""
        return outputs

    @property
    def overrides_postprocess(self) -> bool:
        return type(self).postprocess is not NodeSubmodule.postprocess

    def check_stop(self, info: RequestInfo, outputs: dict[str, list[Any]]) -> set[str]:
        """Names of loops to stop, from values already on the host (E28).

        Common stops (EOS, length, stop ids) are checked by the engine on the whole column;
        override this only for others.
        """
        return set()

    @property
    def overrides_check_stop(self) -> bool:
        return type(self).check_stop is not NodeSubmodule.check_stop

    def remove_request(self, request_id: int) -> None:
        """Free whatever this node keeps of a request outside its state; idempotent (E39)."""
