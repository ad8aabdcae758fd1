"""Drives a model through the real Engine, one step at a time, in the calling thread."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from worker.api.inputs import RequestInfo
from worker.api.model import BuildContext, LoadedModel
from worker.api.outputs import StepOutputs
from worker.device.cpu import CpuDevice
from worker.engine.engine import Engine
from worker.engine.executing_batch import ExecutingBatch
from worker.models import decoder_lm


def load(source: Path, context: int | None = None, **options: Any) -> LoadedModel:
    return decoder_lm.build(
        BuildContext("m", str(source), torch.device("cpu"), torch.float32, context, options)
    )


class EngineDriver:
    node = "m/decoder"

    def __init__(self, model: LoadedModel, pages: int = 256) -> None:
        self.engine = Engine(CpuDevice())
        self.engine.load_model("m", model, pages=pages)
        self._steps = itertools.count(1)
        self._lengths: dict[int, int] = {}
        self._outputs: dict[int, int] = {}

    def prefill(
        self, tokens: Mapping[int, Sequence[int]], waits: Iterable[int] = ()
    ) -> StepOutputs:
        """One prefill step; requests in `waits` are given a chunk that is not their last."""
        return self._step(
            "prefill",
            [
                RequestInfo(r, "prefill", {}, t, self._lengths.get(r, 0), samples=r not in waits)
                for r, t in tokens.items()
            ],
        )

    def decode(self, requests: Iterable[int]) -> StepOutputs:
        return self._step(
            "decode",
            [
                RequestInfo(r, "decode", {}, (), self._lengths[r], self._outputs[r])
                for r in requests
            ],
        )

    def remove(self, request: int) -> None:
        self.engine.remove_request(request)
        self._lengths.pop(request)

    def _step(self, walk: str, infos: list[RequestInfo]) -> StepOutputs:
        for info in infos:
            self.engine.add_request(self.node, info.request_id, {})
        n = next(self._steps)
        batch = ExecutingBatch(
            n, 1, self.node, walk, [i.request_id for i in infos], {i.request_id: i for i in infos}
        )
        self.engine.prepare_batch(batch)
        self.engine.exec_and_postprocess(batch)
        assert batch.error is None, batch.error
        assert not batch.failed_requests, batch.failed_requests
        assert batch.admit_error is None, batch.admit_error
        self.engine.finalize_batch(batch)
        self.engine.check()
        for i in infos:
            grown = max(1, len(i.tokens))
            self._lengths[i.request_id] = self._lengths.get(i.request_id, 0) + grown
            self._outputs[i.request_id] = self._outputs.get(i.request_id, 0) + i.samples
        return batch.outputs
