"""Graphs of the cpu-async device: recorded kernels over fixed buffers, replayed without Python.

As on CUDA, capture executes nothing, and what the captured function did in Python (branches, host
values, counters) is baked in: a replay runs the same kernels on the same buffers.
"""

from collections.abc import Callable
from typing import Any

from worker.device.async_streams import AsyncStream, DeviceState


class AsyncGraph:
    """`outputs`: what the captured function returned; the buffers that every replay writes."""

    def __init__(self, state: DeviceState, current: Callable[[], AsyncStream | None]) -> None:
        self.outputs: Any = None
        self._state = state
        self._current = current
        self._kernels: list[tuple[str, Callable[[], None]]] = []

    def __len__(self) -> int:
        return len(self._kernels)

    @property
    def names(self) -> list[str]:
        """The recorded kernels, in order."""
        return [name for name, _ in self._kernels]

    def launch(self, name: str, kernel: Callable[[], None]) -> None:
        """Record instead of running; capture only."""
        self._kernels.append((name, kernel))

    def replay(self) -> None:
        """Launch on the calling thread's current stream; returns at once."""
        stream = self._current()
        if stream is None:
            raise RuntimeError("a graph is replayed on a stream: enter one first")
        stream.launch("replay", self._run)

    def _run(self) -> None:
        for name, kernel in self._kernels:
            self._state.gate(f"graph:{name}")
            kernel()
