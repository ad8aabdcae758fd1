"""A decoder small enough to read at a glance, which uses every resource of a real one."""

import torch

from tests.support.engine_harness import one_node
from worker.api.inputs import ResourceStep, SubmoduleStep
from worker.api.model import LoadedModel, NodeResourceSpec
from worker.api.outputs import StepOutputs
from worker.api.submodule import NodeSubmodule

CPU = torch.device("cpu")


class ToyDecoder(NodeSubmodule):
    """One attention layer over random projections, sampled: every resource of a real decoder."""

    steady_walks = frozenset({"decode"})

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.embed = torch.nn.Embedding(40, 16)

    def bind_node_resources(self, resources):
        self.attention, self.sampler = resources["attention"], resources["sampler"]

    def declare_step(self, ctx):
        rows = ResourceStep(ctx.segments("main"))
        return SubmoduleStep(dict.fromkeys(("kv", "attention", "positions", "sampler"), rows))

    def preprocess(self, engine, inputs):
        if engine.infos[0].walk == "decode":
            return {"tokens": self.sampler.last_tokens()}
        on_gpu = engine.device.type == "cuda"
        host = torch.tensor([t for i in engine.infos for t in i.tokens], pin_memory=on_gpu)
        return {"tokens": host.to(engine.device, non_blocking=True)}

    def forward_batched(self, engine, **tensors):
        x = self.embed(tensors["tokens"]) + engine.plans["positions"][:, None] / 100
        kv = x[:, :8].reshape(-1, 2, 4)
        x = self.attention.run(0, x.view(-1, 4, 4), kv, kv).flatten(1)
        logits = self.sampler.last_rows(x) @ self.embed.weight.T
        return StepOutputs(self.sampler.request_ids, {"tokens": self.sampler.sample(logits)})


def toy_decoder(device: torch.device = CPU) -> LoadedModel:
    nodes = ("decoder",)
    kv = {"layers": 1, "kv_heads": 2, "head_dim": 4}
    return one_node(
        ToyDecoder().to(device),
        NodeResourceSpec("kv", "paged_kv", nodes, options=kv),
        NodeResourceSpec("attention", "sdpa_attention", nodes, ("kv",)),
        NodeResourceSpec("positions", "positions", nodes, ("kv",)),
        NodeResourceSpec("sampler", "sampler", nodes, options={"vocab": 40}),
        vocab=40,
    )
