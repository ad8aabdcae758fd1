"""An engine on the cpu device, driven as a worker drives it, without threads."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from protocol.graph import GraphSpec, Loop, Step, Walk
from worker.api.inputs import RequestInfo
from worker.api.model import DONE, BuildContext, LoadedModel, NodeResourceSpec
from worker.api.registry import load_builder
from worker.api.submodule import NodeSubmodule
from worker.device.base import Device
from worker.device.cpu import CpuDevice
from worker.engine.engine import Engine
from worker.engine.executing_batch import ExecutingBatch


def reference(**options: Any) -> LoadedModel:
    context = BuildContext("m", "", torch.device("cpu"), torch.float32, None, options)
    return load_builder("reference")(context)


def one_node(
    submodule: NodeSubmodule, *resources: NodeResourceSpec, context: int = 1024, vocab: int = 300
) -> LoadedModel:
    """A model of one node "decoder" with the walks prefill, then decode."""
    node = Step("decoder")
    return LoadedModel(
        graph=GraphSpec(
            nodes=("decoder",),
            walks=(Walk("prefill", node, then="decode"), Walk("decode", Loop("decode", node))),
            entry="prefill",
        ),
        submodules={"decoder": submodule},
        resources=resources,
        next_walk=lambda walk, facts: DONE,
        context=context,
        vocab=vocab,
    )


class Harness:
    """Engine with one model "m" of one node; keeps each request's position and outputs."""

    def __init__(
        self, model: LoadedModel, pages: int | None = None, device: Device | None = None
    ) -> None:
        self.engine = Engine(device or CpuDevice())
        self.engine.load_model("m", model, pages=pages)
        self.node = f"m/{model.graph.nodes[0]}"
        self.params: dict[int, Mapping[str, Any]] = {}
        self.position: dict[int, int] = {}
        self.out: dict[int, list[int]] = {}
        self.steps = 0

    def add(self, *rids: int, **params: Any) -> None:
        for rid in rids:
            self.engine.add_request(self.node, rid, params)
            self.params[rid] = params
            self.position[rid] = 0
            self.out[rid] = []

    def remove(self, *rids: int) -> None:
        for rid in rids:
            self.engine.remove_request(rid)

    def batch(
        self,
        rows: Sequence[int] | Mapping[int, Sequence[int]],
        walk: str | None = None,
        partial: Sequence[int] = (),
    ) -> ExecutingBatch:
        """Prepared for `exec`: decode of request ids, or prefill of their tokens.

        `partial`: ids for which this is not the last chunk.
        """
        self.steps += 1
        tokens = rows if isinstance(rows, Mapping) else {}
        walk = walk or ("prefill" if tokens else "decode")
        infos = {
            rid: RequestInfo(
                request_id=rid,
                walk=walk,
                params=self.params.get(rid, {}),
                tokens=tokens.get(rid, ()),
                position=self.position.get(rid, 0),
                output_position=len(self.out.get(rid, ())),
                samples=rid not in partial,
            )
            for rid in rows
        }
        return ExecutingBatch(self.steps, 1, self.node, walk, list(rows), infos)

    def run(self, batch: ExecutingBatch) -> ExecutingBatch:
        """Prepare, run and post a step, and take its tokens. Events must all be set."""
        self.engine.prepare_batch(batch)
        spans = {rid: i.span for rid, i in batch.inputs.items()}
        self.engine.exec_and_postprocess(batch)
        assert batch.launch_started_event.is_set()
        assert batch.commit_done.is_set()
        assert batch.outputs_ready.is_set()
        self.engine.check()
        batch.completion_event.synchronize()
        if batch.error is None and batch.admit_error is None:
            for rid in batch.request_ids:
                self.position[rid] += spans[rid]
            for rid in batch.outputs:
                self.out[rid].append(int(batch.outputs[rid]["tokens"][0]))
        return batch

    def step(self, rows: Sequence[int] | Mapping[int, Sequence[int]], **how: Any) -> ExecutingBatch:
        return self.run(self.batch(rows, **how))
