"""Device: streams, events and copies behind one interface, so that the engine has one path.

`cpu` runs inline on the GPU thread. `cuda` is asynchronous. An event that was never recorded is
complete, as on CUDA.
"""

from contextlib import AbstractContextManager
from typing import Protocol

import torch


class DeviceEvent(Protocol):
    def record(self) -> None:
        """On the current stream of the calling thread."""
        ...

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Wait until the recorded work is done; raises what that work raised."""
        ...


class Device(Protocol):
    name: str
    torch_device: torch.device

    def new_event(self) -> DeviceEvent: ...

    def compute(self) -> AbstractContextManager[None]:
        """Enter the compute stream and this thread's modes (`no_grad`); GPU thread."""
        ...

    def readback(self) -> AbstractContextManager[None]:
        """Enter the device-to-host stream and this thread's modes; postprocess thread."""
        ...

    def to_host(self, tensor: torch.Tensor, after: DeviceEvent | None) -> torch.Tensor:
        """A host copy of `tensor`, valid on return; waits for `after` on the calling thread."""
        ...

    def memory(self) -> tuple[int, int]:
        """(free, total) bytes."""
        ...

    def fatal(self, error: BaseException) -> bool:
        """True where the device can't be used after this error: the worker must end."""
        ...

    def close(self) -> None: ...
