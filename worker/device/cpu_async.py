"""The cpu-async device, for tests: a CPU that is as asynchronous as a GPU.

Its streams are threads. Under `compute`, `readback` and `stream` every operator is a launch: the
call returns at once, with outputs that are poisoned until their kernel ran (worker/device/
poison.py). So what is read too early, or written too soon, shows, as it would on a GPU by chance.
A `gate` lets a test force any interleaving. What it can't show: an allocator that gives a block out
again while another stream still uses it.

A thread outside these contexts is on the default stream, which is the thread itself: its work is
done when the call returns, and nothing watches what it reads.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch

from worker.device import poison
from worker.device.async_graph import AsyncGraph
from worker.device.async_launch import LaunchMode, ListingMode, Place
from worker.device.async_streams import (
    AsyncDeviceError,
    AsyncEvent,
    AsyncStream,
    DeviceState,
    Gate,
)
from worker.device.base import DeviceEvent, DeviceStream


class CpuAsyncDevice:
    """`gate(name)` is called on a stream's thread before each item: "stream:operator", and
    "stream:record", ":wait", ":replay", ":copy" (a readback; ":synchronize" follows it) or a
    `mark`'s name; "graph:operator" within a replay. Streams are "compute", "readback" and those of
    `new_stream`.

    `threads`: intra-op threads of each stream.
    """

    captures = True

    def __init__(self, gate: Gate | None = None, threads: int = 1) -> None:
        self.name = "cpu-async"
        self.torch_device = torch.device("cpu")
        self._state = DeviceState(gate)
        self._threads = threads
        self._local = threading.local()
        self._streams: list[AsyncStream] = []
        self._compute = self.new_stream("compute")
        self._readback = self.new_stream("readback")

    # ---- events and streams

    def new_event(self) -> AsyncEvent:
        return AsyncEvent(self._state, self._current)

    def new_stream(self, name: str) -> AsyncStream:
        stream = AsyncStream(self._state, name, self._threads)
        self._streams.append(stream)
        return stream

    @contextmanager
    def compute(self) -> Iterator[None]:
        with self._on(Place(self._compute, self._compute)):
            yield

    @contextmanager
    def readback(self) -> Iterator[None]:
        with self._on(Place(self._readback, self._readback, may_read=True)):
            yield

    @contextmanager
    def stream(self, stream: DeviceStream) -> Iterator[None]:
        assert isinstance(stream, AsyncStream), "a stream of another device"
        with self._on(Place(stream, stream)):
            yield

    def mark(self, name: str) -> None:
        """A point in the current stream that only the gate sees."""
        self._place().launcher.launch(name, _nothing)

    def synchronize(self) -> None:
        """Until every stream has run what was launched. Raises the sticky error."""
        for stream in self._streams:
            stream.synchronize()

    # ---- graphs

    def capture(self, function: Callable[[], Any]) -> AsyncGraph:
        """Record what `function` launches; nothing runs. No event may be touched in it."""
        graph = AsyncGraph(self._state, self._current)
        with self._on(Place(self._compute, graph)):
            graph.outputs = function()
        return graph

    # ---- copies and figures

    def to_host(self, tensor: torch.Tensor, after: DeviceEvent | None) -> torch.Tensor:
        """`after` None: behind all that the compute stream holds now. Raises `PoisonRead` where
        the copy came before the values."""
        self._current()  # not while capturing
        if after is None:
            after = self.new_event()
            after.record_on(self._compute)
        if isinstance(after, AsyncEvent):
            after.wait_on(self._readback)
        else:
            after.synchronize()
        source, copies = tensor.detach(), list[torch.Tensor]()
        self._readback.launch("copy", lambda: copies.append(source.clone()))
        self._readback.synchronize()
        poison.check(copies[0], "a copy to the host")
        return copies[0]

    def memory(self) -> tuple[int, int]:
        found = psutil.virtual_memory()
        return found.available, found.total

    def fatal(self, error: BaseException) -> bool:
        """Poison that was read is fatal too: whatever let it through can't be trusted."""
        return isinstance(error, AsyncDeviceError | poison.PoisonRead)

    def close(self) -> None:
        """Runs what is queued, then ends the threads. Idempotent."""
        streams, self._streams = self._streams, []
        stuck = [s.name for s in streams if not s.close()]
        if stuck:
            raise TimeoutError(f"streams that do not end: {stuck}")

    # ---- inside

    def _place(self) -> Place:
        place: Place | None = getattr(self._local, "place", None)
        if place is None:
            raise RuntimeError("this thread is on no stream of the device")
        return place

    def _current(self) -> AsyncStream | None:
        """The calling thread's stream. Raises while it captures: nothing there may wait or end."""
        place: Place | None = getattr(self._local, "place", None)
        if place is None:
            return None
        if place.capturing:
            raise RuntimeError("this can't be captured: events, copies and replays are outside")
        return place.stream

    @contextmanager
    def _on(self, place: Place) -> Iterator[None]:
        before: Place | None = getattr(self._local, "place", None)
        if before is not None and before.capturing:
            if place.stream is not before.stream:
                raise RuntimeError("a capture holds one stream; another can't be entered in it")
            place = before
        self._local.place = place
        try:
            if before is not None:
                with torch.no_grad():
                    yield
            else:
                with torch.no_grad(), ListingMode(self._place), LaunchMode(self._place):
                    yield
        finally:
            self._local.place = before


def _nothing() -> None:
    return None
