"""Drives a Decoder without an engine: dense keys and values, greedy sampling, no pages.

It shares no code with worker.resources, so a fault there and a fault in the model show apart.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from worker.api.inputs import ModelInputsFromEngine, RequestInfo, StepContext
from worker.api.model import BuildContext, LoadedModel
from worker.api.outputs import StepOutputs
from worker.api.states import LazyRequestStates, PerRequestState
from worker.models.decoder_lm import Decoder, build

CPU = torch.device("cpu")


def load(source: Path, context: int | None = None, **options: Any) -> LoadedModel:
    return build(BuildContext("test", str(source), CPU, torch.float32, context, options))


class DenseHarness:
    """Both handles of one node, and the step that uses them."""

    def __init__(self, model: LoadedModel) -> None:
        node = model.submodules["decoder"]
        assert isinstance(node, Decoder)
        self.node = node
        self.cache: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        self.lengths: dict[int, int] = {}
        self.last: dict[int, torch.Tensor] = {}
        self.infos: list[RequestInfo] = []
        self.spans: list[int] = []
        node.bind_node_resources({k: self for k in ("kv", "attention", "positions", "sampler")})

    # ---- AttentionHandle

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        outs: list[torch.Tensor] = []
        at = 0
        for info, span in zip(self.infos, self.spans, strict=True):
            part = slice(at, at + span)
            at += span
            key = (info.request_id, layer)
            old = self.cache.get(key, (k[:0], v[:0]))
            keys, values = torch.cat([old[0], k[part]]), torch.cat([old[1], v[part]])
            self.cache[key] = keys, values
            mask = torch.ones(span, len(keys), dtype=torch.bool).tril(len(keys) - span)
            o = functional.scaled_dot_product_attention(
                q[part].transpose(0, 1)[None],
                keys.transpose(0, 1)[None],
                values.transpose(0, 1)[None],
                mask,
                enable_gqa=True,
            )
            outs.append(o[0].transpose(0, 1))
        return torch.cat(outs)

    # ---- SamplerHandle

    @property
    def request_ids(self) -> Sequence[int]:
        return [i.request_id for i in self.infos if i.samples]

    def last_tokens(self) -> torch.Tensor:
        return torch.stack([self.last[i.request_id] for i in self.infos])

    def last_rows(self, x: torch.Tensor) -> torch.Tensor:
        ends = torch.tensor(self.spans).cumsum(0) - 1
        return x[ends[[i.samples for i in self.infos]]]

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        self.accept(logits.argmax(-1))
        return logits.argmax(-1)

    def accept(self, tokens: torch.Tensor) -> None:
        self.last.update(zip(self.request_ids, tokens, strict=True))

    # ---- steps

    @torch.no_grad()
    def step(self, infos: list[RequestInfo]) -> StepOutputs:
        self.infos = infos
        inputs = [self.node.prepare_inputs(i) for i in infos]
        self.spans = [i.span for i in inputs]
        ids = [i.request_id for i in infos]
        starts = [self.lengths.get(r, 0) for r in ids]
        ctx = StepContext("decoder", infos[0].walk, ids, infos, self.spans)
        step = self.node.declare_step(ctx)
        positions = torch.cat(
            [torch.arange(a, a + n) for a, n in zip(starts, self.spans, strict=True)]
        )
        engine = ModelInputsFromEngine(
            ids, infos, {}, {"positions": positions}, LazyRequestStates(lambda _: PerRequestState()),
            step, CPU,
        )  # fmt: skip
        out = self.node.forward_batched(engine, **self.node.preprocess(engine, inputs))
        self.lengths.update({r: a + n for r, a, n in zip(ids, starts, self.spans, strict=True)})
        return out

    def prefill(self, tokens: dict[int, Sequence[int]], samples: bool = True) -> StepOutputs:
        return self.step(
            [RequestInfo(r, "prefill", {}, tokens=t, samples=samples) for r, t in tokens.items()]
        )

    def decode(self, ids: Sequence[int]) -> StepOutputs:
        return self.step([RequestInfo(r, "decode", {}) for r in ids])
