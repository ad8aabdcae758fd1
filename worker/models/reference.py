"""reference: a model without weights whose every token is known beforehand, for tests.

It keeps its whole token history in KV pages and hashes that history as gathered through the page
table, so a wrong page, position, length or row shows as a wrong token. The rule, and its twin in
plain Python, are in worker/models/reference_hash.py; integer arithmetic is exact, so outputs are
bit-identical on every device and in every batch.

Options: `key` (0), `eos_every` (0: never), `context` (4096), `step_ms` (0: how long a forward
keeps the device busy), `faults` (worker/models/reference_faults.py).
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from protocol.errors import ConfigError
from protocol.graph import GraphSpec, Loop, Step, Walk
from worker.api.handles import KvHandle, KvPlan, SamplerHandle
from worker.api.inputs import (
    ModelInputsFromEngine,
    NodeInputs,
    RequestInfo,
    ResourceStep,
    StepContext,
    SubmoduleStep,
)
from worker.api.model import DONE, BuildContext, LoadedModel, Next, NodeResourceSpec
from worker.api.nearest import nearest
from worker.api.outputs import StepOutputs
from worker.api.submodule import NodeSubmodule
from worker.models import reference_hash as rule
from worker.models.reference_faults import Faults

NODE = "decoder"
OPTIONS = ("key", "eos_every", "context", "step_ms", "faults")
DEFAULT_CONTEXT = 4096
DEFAULT_PAGES = 16384


def build(context: BuildContext) -> LoadedModel:
    o = context.options
    for name in o:
        if name not in OPTIONS:
            raise ConfigError(f"reference: unknown option {name!r}{nearest(name, OPTIONS)}")
    decoder = ReferenceDecoder(
        key=int(o.get("key", 0)),
        eos_every=int(o.get("eos_every", 0)),
        step_ms=float(o.get("step_ms", 0)),
        faults=Faults.parse(o.get("faults", ())),
    )
    history = {
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 1,
        "values": False,
        "dtype": torch.int64,
        "default_pages": DEFAULT_PAGES,
    }
    graph = GraphSpec(
        nodes=(NODE,),
        walks=(
            Walk("prefill", Step(NODE), then="decode"),
            Walk("decode", Loop("decode", Step(NODE))),
        ),
        entry="prefill",
    )
    return LoadedModel(
        graph=graph,
        submodules={NODE: decoder},
        resources=(
            NodeResourceSpec("kv", "paged_kv", (NODE,), options=history),
            NodeResourceSpec("sampler", "sampler", (NODE,)),
        ),
        next_walk=next_walk,
        context=int(context.context or o.get("context", DEFAULT_CONTEXT)),
        vocab=rule.VOCAB,
        eos=(rule.EOS,),
    )


def next_walk(walk: str, facts: Mapping[str, Any]) -> Next:
    return Next("decode") if walk == "prefill" and not facts.get("stop") else DONE


class ReferenceDecoder(NodeSubmodule):
    kv: KvHandle
    sampler: SamplerHandle

    def __init__(self, key: int, eos_every: int, step_ms: float, faults: Faults) -> None:
        super().__init__()
        self.key = signed(rule.mix(key))
        self.eos_every = eos_every
        self.step_s = step_ms / 1000
        self.faults = faults
        if not faults.has("prepare"):
            self.steady_walks = frozenset({"decode"})

    def bind_node_resources(self, resources: Mapping[str, Any]) -> None:
        self.kv, self.sampler = resources["kv"], resources["sampler"]

    def prepare_inputs(self, info: RequestInfo) -> NodeInputs:
        self.faults.arm(info)
        self.faults.fire("prepare", (info,))
        return NodeInputs(span=max(1, len(info.tokens)))

    def declare_step(self, ctx: StepContext) -> SubmoduleStep:
        rows = ResourceStep(ctx.segments("main"))
        return SubmoduleStep({"kv": rows, "sampler": rows})

    def preprocess(
        self, engine: ModelInputsFromEngine, inputs: Sequence[NodeInputs]
    ) -> dict[str, torch.Tensor]:
        if not any(len(i.tokens) for i in engine.infos):
            return {"tokens_T": self.sampler.last_tokens()}
        flat = [t for i in engine.infos for t in i.tokens]
        return {"tokens_T": _upload(flat, engine.device)}

    def forward_batched(
        self, engine: ModelInputsFromEngine, **tensors: torch.Tensor
    ) -> StepOutputs:
        if self.step_s:
            time.sleep(self.step_s)
        plan: KvPlan = engine.plans["kv"]
        self.kv.write(0, tensors["tokens_T"].view(-1, 1, 1))
        rows = len(engine.infos)
        history_BL = self.kv.keys(0).index_select(0, plan.page_table.reshape(-1)).view(rows, -1)
        tokens_B = next_tokens(history_BL, plan.lengths, self.key, self.eos_every)
        samples = [i for i, info in enumerate(engine.infos) if info.samples]
        if len(samples) < rows:
            tokens_B = tokens_B.index_select(0, _upload(samples, engine.device))
        outputs = StepOutputs(self.sampler.request_ids, {"tokens": self.sampler.accept(tokens_B)})
        # Last, so that whatever the step wrote is there when a fault undoes it.
        self.faults.fire("forward", engine.infos)
        return outputs

    @property
    def overrides_postprocess(self) -> bool:
        return self.faults.has("postprocess")

    def postprocess(
        self, info: RequestInfo, outputs: dict[str, list[torch.Tensor]]
    ) -> dict[str, list[torch.Tensor]]:
        self.faults.fire("postprocess", (info,))
        return outputs

    @property
    def overrides_check_stop(self) -> bool:
        return self.faults.has("check_stop")

    def check_stop(self, info: RequestInfo, outputs: dict[str, list[Any]]) -> set[str]:
        self.faults.fire("check_stop", (info,))
        return set()

    def remove_request(self, request_id: int) -> None:
        self.faults.forget(request_id)


def _upload(values: list[int], device: torch.device) -> torch.Tensor:
    """[n] int64, pinned for a GPU so that the copy does not wait."""
    host = torch.tensor(values, dtype=torch.int64, pin_memory=device.type == "cuda")
    return host.to(device, non_blocking=True)


# ---- the rule over tensors: int64, which wraps modulo 2 ** 64 as the rule does


def signed(x: int) -> int:
    """The int64 that has the bits of the unsigned 64-bit `x`."""
    x &= rule.MASK
    return x - (1 << 64) if x >> 63 else x


def next_tokens(
    history_BL: torch.Tensor, lengths_B: torch.Tensor, mixed_key: int, eos_every: int
) -> torch.Tensor:
    """[B] int64: the token after the first `lengths_B` tokens of each history."""
    at_L = torch.arange(history_BL.shape[1], device=history_BL.device)
    mixed_BL = _mix(
        (history_BL + 1) * signed(rule.TOKEN_FACTOR)
        + ((at_L + 1) * signed(rule.POSITION_FACTOR) + mixed_key)
    )
    h_B = _mix(mixed_BL.masked_fill(at_L >= lengths_B[:, None], 0).sum(-1))
    tokens_B = rule.FIRST + _shift(h_B, 11) % rule.SPAN
    if eos_every:
        ends_B = _shift(_mix(h_B + signed(rule.EOS_SALT)), 11) % eos_every == 0
        tokens_B = tokens_B.masked_fill(ends_B, rule.EOS)
    return tokens_B


def _shift(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift right: torch's is arithmetic."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = (x ^ _shift(x, 30)) * signed(rule.MIX_1)
    x = (x ^ _shift(x, 27)) * signed(rule.MIX_2)
    return x ^ _shift(x, 31)
