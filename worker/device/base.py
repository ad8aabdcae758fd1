"""Device: streams, events and copies behind one interface, so that the engine has one path.

`cpu` runs inline on the GPU thread. `cuda` is asynchronous. `cpu-async`, for tests, is as
asynchronous on a CPU. An event that was never recorded is complete, as on CUDA.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch


class DeviceEvent(Protocol):
    def record(self) -> None:
        """On the current stream of the calling thread."""
        ...

    def wait(self) -> None:
        """What the calling thread's current stream is given from here on runs after the work that
        was recorded before this call. Does not wait itself."""
        ...

    def query(self) -> bool: ...

    def synchronize(self) -> None:
        """Wait until the recorded work is done; raises what that work raised."""
        ...


class DeviceStream(Protocol):
    def synchronize(self) -> None:
        """Wait until all that was launched on it is done; raises what that work raised."""
        ...


class DeviceGraph(Protocol):
    """Captured launches over fixed buffers. `outputs`: what the captured function returned, the
    buffers that every replay writes."""

    outputs: Any

    def replay(self) -> None:
        """Launch all of it on the calling thread's current stream; no Python of it runs again."""
        ...


class Device(Protocol):
    """`captures`: it has graphs."""

    name: str
    torch_device: torch.device
    captures: bool

    def new_event(self) -> DeviceEvent: ...

    def new_stream(self, name: str) -> DeviceStream: ...

    def stream(self, stream: Any) -> AbstractContextManager[None]:
        """Enter a stream of `new_stream` and this thread's modes."""
        ...

    def capture(self, function: Callable[[], Any]) -> DeviceGraph:
        """Record what `function` launches on the compute stream. It must have run once before, and
        must touch no event and read no value. RuntimeError where the device has no graphs."""
        ...

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
