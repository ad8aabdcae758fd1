"""Decoder-only language models: one node, a prefill walk and a decode loop.

The architecture is Llama's (LlamaForCausalLM): RMSNorm, rotary positions, grouped queries, SwiGLU.
Weights come from a GGUF file or a Hugging Face folder.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from protocol.errors import ConfigError
from protocol.graph import GraphSpec, Loop, Step, Walk
from worker.api.handles import AttentionHandle, SamplerHandle
from worker.api.inputs import (
    ModelInputsFromEngine,
    NodeInputs,
    RequestInfo,
    ResourceStep,
    StepContext,
    SubmoduleStep,
)
from worker.api.model import DONE, BuildContext, LoadedModel, Next, NodeResourceSpec
from worker.api.outputs import StepOutputs
from worker.api.submodule import NodeSubmodule
from worker.models.llama import Llama, load_weights
from worker.models.weights.checkpoint import LlamaConfig, check_tensors
from worker.models.weights.open import open_checkpoint

_NODE, _PREFILL, _DECODE = "decoder", "prefill", "decode"
_RESOURCES = ("kv", "attention", "positions", "sampler")
_OPTIONS = {"keep_logits": bool}


class Decoder(NodeSubmodule):
    """The one node. `prefill` takes the host's tokens, `decode` each row's last sampled one.

    Outputs, for the rows that sample: `tokens` [S] int64 and, with `keep_logits`, `logits` [S, V]
    float32.
    """

    prepares_without_values = True
    steady_walks = frozenset({_DECODE})

    def __init__(self, network: Llama, *, keep_logits: bool = False) -> None:
        super().__init__()
        self.network = network
        self.keep_logits = keep_logits

    def bind_node_resources(self, resources: Mapping[str, Any]) -> None:
        self._attention: AttentionHandle = resources["attention"]
        self._sampler: SamplerHandle = resources["sampler"]

    def prepare_inputs(self, info: RequestInfo) -> NodeInputs:
        if info.walk == _DECODE:
            return NodeInputs(span=1)
        if not info.tokens:
            raise ValueError("a prefill step needs at least one token")
        return NodeInputs(span=len(info.tokens))

    def declare_step(self, ctx: StepContext) -> SubmoduleStep:
        segments = ctx.segments("main")
        return SubmoduleStep({key: ResourceStep(segments) for key in _RESOURCES})

    def preprocess(
        self, engine: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, torch.Tensor]:
        """Tokens of all rows, packed: [T] int64."""
        if engine.infos[0].walk == _DECODE:
            return {"tokens": self._sampler.last_tokens()}
        packed = list(chain.from_iterable(info.tokens for info in engine.infos))
        on_gpu = engine.device.type == "cuda"  # pinned, so that the copy does not wait
        host = torch.tensor(packed, dtype=torch.int64, pin_memory=on_gpu)
        return {"tokens": host.to(engine.device, non_blocking=True)}

    def forward_batched(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, engine: ModelInputsFromEngine, tokens: torch.Tensor
    ) -> StepOutputs:
        """tokens [T] int64 → one sampled token of every row that samples."""
        x = self.network(tokens, engine.plans["positions"], self._attention)
        rows = self._sampler.request_ids
        if not rows:
            return StepOutputs()
        logits = self.network.logits(self._sampler.last_rows(x))
        columns = {"tokens": self._sampler.sample(logits)}
        if self.keep_logits:
            columns["logits"] = logits
        return StepOutputs(rows, columns)


def next_walk(walk: str, facts: Mapping[str, Any]) -> Next:
    """Prefill is followed by decode; the end of decode is the request's."""
    return Next(_DECODE) if walk == _PREFILL else DONE


def build(context: BuildContext) -> LoadedModel:
    """Load a Llama decoder from `context.source`: a `.gguf` file or a Hugging Face folder.

    Options: `keep_logits` (false): outputs carry the logits too. Everything that can be wrong with
    the files is found before memory is allocated. Raises `ConfigError`.
    """
    options = _checked_options(context)
    checkpoint = open_checkpoint(Path(context.source))
    check_tensors(checkpoint)
    c = checkpoint.config
    limit = min(context.context or c.context, c.context)
    network = Llama(c, limit, device=context.device, dtype=context.dtype)
    load_weights(network, checkpoint, context.progress)
    return LoadedModel(
        graph=GraphSpec(
            nodes=(_NODE,),
            walks=(
                Walk(_PREFILL, Step(_NODE), then=_DECODE),
                Walk(_DECODE, Loop("tokens", Step(_NODE))),
            ),
            entry=_PREFILL,
        ),
        submodules={_NODE: Decoder(network, **options)},
        resources=_resources(c, limit),
        next_walk=next_walk,
        context=limit,
        vocab=c.vocab,
        eos=c.eos,
    )


def _resources(c: LlamaConfig, context: int) -> list[NodeResourceSpec]:
    nodes = (_NODE,)
    kv = {
        "layers": c.layers,
        "kv_heads": c.kv_heads,
        "head_dim": c.head_dim,
        "context": context,
    }
    return [
        NodeResourceSpec("kv", "paged_kv", nodes, options=kv),
        NodeResourceSpec(
            "attention", "sdpa_attention", nodes, ("kv",), {"scale": c.head_dim**-0.5}
        ),
        NodeResourceSpec("positions", "positions", nodes, ("kv",)),
        NodeResourceSpec("sampler", "sampler", nodes),
    ]


def _checked_options(context: BuildContext) -> dict[str, Any]:
    for key, value in context.options.items():
        if key not in _OPTIONS:
            raise ConfigError(
                f"model {context.name!r}: unknown option {key!r}; known: {', '.join(_OPTIONS)}"
            )
        if not isinstance(value, _OPTIONS[key]):
            raise ConfigError(
                f"model {context.name!r}: option {key!r} must be {_OPTIONS[key].__name__}, "
                f"got {value!r}"
            )
    return dict(context.options)
