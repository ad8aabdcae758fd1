"""The cpu device: everything runs inline on the calling thread; events are complete at once."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import psutil
import torch

from worker.device.base import DeviceEvent


class CpuEvent:
    """Recorded work is done when `record` is called, so there is nothing to wait for."""

    def record(self) -> None:
        return None

    def wait(self) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuStream:
    """The calling thread, under a name."""

    def __init__(self, name: str) -> None:
        self.name = name

    def synchronize(self) -> None:
        return None


class CpuDevice:
    captures = False

    def __init__(self) -> None:
        self.name = "cpu"
        self.torch_device = torch.device("cpu")

    def new_event(self) -> CpuEvent:
        return CpuEvent()

    def new_stream(self, name: str) -> CpuStream:
        return CpuStream(name)

    @contextmanager
    def stream(self, stream: CpuStream) -> Iterator[None]:
        with torch.no_grad():
            yield

    def capture(self, function: Callable[[], Any]) -> NoReturn:
        raise RuntimeError("the cpu device has no graphs")

    @contextmanager
    def compute(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    @contextmanager
    def readback(self) -> Iterator[None]:
        with torch.no_grad():
            yield

    def to_host(self, tensor: torch.Tensor, after: DeviceEvent | None) -> torch.Tensor:
        if after is not None:
            after.synchronize()
        return tensor.detach().clone()

    def memory(self) -> tuple[int, int]:
        found = psutil.virtual_memory()
        return found.available, found.total

    def fatal(self, error: BaseException) -> bool:
        return False

    def close(self) -> None:
        return None
