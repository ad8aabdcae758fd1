"""An engine of a few lines for tests of the threads: it records calls and breaks as told."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch

from worker.api.outputs import StepOutputs
from worker.device.cpu import CpuEvent
from worker.engine.executing_batch import ExecutingBatch


class DeviceLost(RuntimeError):
    """What this engine takes for a sticky device error."""


class FakeEngine:
    """A step's token is the row's output position plus 1000 times its id. `on_step(batch)` may set
    what it likes on the batch, or raise. Events named in `forgets` are not set."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.known: set[int] = set()
        self.on_step: Callable[[ExecutingBatch], None] = lambda batch: None
        self.on_ingest: Callable[[int], None] = lambda rid: None
        self.stops: dict[int, set[str]] = {}
        self.forgets: set[str] = set()
        self.threads: set[str] = set()

    def add_request(self, node: str, request_id: int, params: Mapping[str, Any]) -> None:
        self.calls.append(("add", node, request_id))
        self.on_ingest(request_id)
        self.known.add(request_id)

    def remove_request(self, request_id: int) -> None:
        self.calls.append(("remove", request_id))
        self.known.discard(request_id)

    def prepare_batch(self, batch: ExecutingBatch) -> None:
        self.threads.add(threading.current_thread().name)
        self.calls.append(("step", batch.step, tuple(batch.request_ids)))
        unknown = set(batch.request_ids) - self.known
        assert not unknown, f"step {batch.step} has rows that were never ingested: {unknown}"

    def exec_and_postprocess(self, batch: ExecutingBatch) -> None:
        try:
            self.on_step(batch)
            if batch.error is None and batch.admit_error is None:
                rows = list(batch.request_ids)
                tokens = [1000 * r + batch.per_request_info[r].output_position for r in rows]
                batch.outputs = StepOutputs(rows, {"tokens": torch.tensor(tokens)})
        finally:
            batch.completion_event = batch.completion_event or CpuEvent()
            for name in ("launch_started_event", "commit_done", "outputs_ready"):
                if name not in self.forgets:
                    getattr(batch, name).set()

    def check_stop_for_batch(self, batch: ExecutingBatch, host_outputs: Any) -> dict[int, set[str]]:
        self.threads.add(threading.current_thread().name)
        return {r: s for r, s in self.stops.items() if r in host_outputs}

    def finalize_batch(self, batch: ExecutingBatch) -> None:
        self.calls.append(("finalize", batch.step))

    def is_fatal(self, error: BaseException) -> bool:
        return isinstance(error, DeviceLost)
