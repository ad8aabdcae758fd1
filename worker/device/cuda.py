"""The cuda device: one compute stream, one device-to-host stream, CUDA events.

Work that the GPU thread enqueues runs on the compute stream in order, so state freed by one step
and taken by a later one needs no fence. The postprocess thread copies on its own stream behind the
step's completion event, into pinned memory, and waits for that copy alone.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from worker.device.base import DeviceEvent


class CudaEvent:
    def __init__(self) -> None:
        self.event = torch.cuda.Event()

    def record(self) -> None:
        self.event.record()

    def wait(self) -> None:
        self.event.wait()

    def query(self) -> bool:
        return self.event.query()

    def synchronize(self) -> None:
        """Drops the GIL while it waits. Spins: a blocking wait wakes tens of microseconds late."""
        self.event.synchronize()


class CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: Any) -> None:
        self.outputs = outputs
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()


class CudaDevice:
    captures = True

    def __init__(self, index: int = 0) -> None:
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._compute = torch.cuda.Stream(self.torch_device)
        self._readback = torch.cuda.Stream(self.torch_device)

    def new_event(self) -> CudaEvent:
        return CudaEvent()

    def new_stream(self, name: str) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.torch_device)

    @contextmanager
    def stream(self, stream: torch.cuda.Stream) -> Iterator[None]:
        with torch.cuda.stream(stream), torch.no_grad():
            yield

    def capture(self, function: Callable[[], Any]) -> CudaGraph:
        """Other threads may go on with CUDA meanwhile: what they do is not captured."""
        graph = torch.cuda.CUDAGraph()
        mode = "thread_local"
        with (
            torch.no_grad(),
            torch.cuda.graph(graph, stream=self._compute, capture_error_mode=mode),
        ):
            outputs = function()
        return CudaGraph(graph, outputs)

    @contextmanager
    def compute(self) -> Iterator[None]:
        with torch.cuda.stream(self._compute), torch.no_grad():
            yield

    @contextmanager
    def readback(self) -> Iterator[None]:
        with torch.cuda.stream(self._readback), torch.no_grad():
            yield

    def to_host(self, tensor: torch.Tensor, after: DeviceEvent | None) -> torch.Tensor:
        """`after` None: behind all that the compute stream holds now."""
        if not tensor.is_cuda:
            if after is not None:
                after.synchronize()
            return tensor.detach().clone()
        if isinstance(after, CudaEvent):
            self._readback.wait_event(after.event)
        else:
            self._readback.wait_stream(self._compute)
        with torch.cuda.stream(self._readback):
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.detach(), non_blocking=True)
            # The allocator gave the tensor out on the compute stream: it may not reuse the block
            # for a later step before this copy has run.
            tensor.record_stream(self._readback)
            done = torch.cuda.Event()
            done.record()
        done.synchronize()
        return host

    def memory(self) -> tuple[int, int]:
        return torch.cuda.mem_get_info(self.torch_device)

    def fatal(self, error: BaseException) -> bool:
        """True where the CUDA context is lost: sticky errors, not a failed allocation."""
        if isinstance(error, torch.OutOfMemoryError):
            return False
        kind = getattr(torch, "AcceleratorError", None)
        return (kind is not None and isinstance(error, kind)) or "CUDA error" in str(error)

    def close(self) -> None:
        torch.cuda.synchronize(self.torch_device)
