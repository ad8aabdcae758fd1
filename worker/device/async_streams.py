"""Streams of the cpu-async device: a thread each, which runs what was launched on it, in order.

Owns: its queue. Waits on: the queue, events of other streams (bounded), the test's gate. Signals:
events. Never: launches. An error in a kernel is sticky for the whole device, as a GPU's is: kernels
after it are skipped, events still fire so that nobody hangs, and every later launch, wait or
synchronization raises it.
"""

import queue
import threading
from collections.abc import Callable

import torch

BOUND_S = 60.0
"""No wait of the device lasts longer: what is waited for is then never coming."""

Gate = Callable[[str], None]
"""Called on a stream's thread before each item, as "stream:item"; it may block."""


class AsyncDeviceError(RuntimeError):
    """A kernel failed; the device is lost. The kernel's own error is the cause."""


class DeviceState:
    """What all streams of one device share: the gate, and the first error."""

    def __init__(self, gate: Gate | None) -> None:
        self._gate = gate
        self._lock = threading.Lock()
        self.error: BaseException | None = None
        self.where = ""

    def gate(self, name: str) -> None:
        if self._gate is not None:
            self._gate(name)

    def fail(self, where: str, error: BaseException) -> None:
        with self._lock:
            if self.error is None:
                self.where, self.error = where, error

    def check(self) -> None:
        """Raises `AsyncDeviceError` once a kernel has failed."""
        if self.error is not None:
            raise AsyncDeviceError(
                f"kernel {self.where!r} failed before: {type(self.error).__name__}: {self.error}"
            ) from self.error


class AsyncStream:
    """`threads`: intra-op threads of its kernels."""

    def __init__(self, state: DeviceState, name: str, threads: int = 1) -> None:
        self.name = name
        self.state = state
        self._threads = threads
        # (name, kernel, whether it runs on a lost device too)
        self._items: queue.SimpleQueue[tuple[str, Callable[[], None], bool] | None]
        self._items = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"stream-{name}", daemon=True)
        self._thread.start()

    # ---- any thread

    def launch(self, name: str, kernel: Callable[[], None]) -> None:
        """Queue a kernel; never waits. Raises the device's sticky error."""
        self.state.check()
        self._items.put((name, kernel, False))

    def signal(self, name: str, done: threading.Event) -> None:
        """Set `done` after what was launched before, whether that failed or not."""
        self._items.put((name, done.set, True))

    def synchronize(self) -> None:
        """Until all that was launched before has run. Raises the sticky error."""
        done = threading.Event()
        self.signal("synchronize", done)
        bounded(done, f"stream {self.name!r} to drain")
        self.state.check()

    def close(self) -> bool:
        """End after what is queued. False: something in it still runs after `BOUND_S`."""
        self._items.put(None)
        self._thread.join(BOUND_S)
        return not self._thread.is_alive()

    # ---- the thread

    def _run(self) -> None:
        torch.get_num_threads()  # this thread's pool is set up now, so the next line is the last
        torch.set_num_threads(self._threads)
        torch.set_grad_enabled(False)
        while (item := self._items.get()) is not None:
            self._perform(*item)

    def _perform(self, name: str, kernel: Callable[[], None], always: bool) -> None:
        where = f"{self.name}:{name}"
        try:
            self.state.gate(where)
            if self.state.error is None:
                kernel()
                return
        except BaseException as e:
            self.state.fail(where, e)
        if always:
            kernel()


class AsyncEvent:
    """CUDA's semantics: never recorded is complete; `wait` binds to the `record` before it.

    `current()`: the calling thread's stream, or None for the default stream, which is the calling
    thread itself: all that it did is done.
    """

    def __init__(self, state: DeviceState, current: Callable[[], AsyncStream | None]) -> None:
        self._state = state
        self._current = current
        self._done: threading.Event | None = None

    def record(self) -> None:
        stream = self._current()
        if stream is None:
            self._done = None
        else:
            self.record_on(stream)

    def record_on(self, stream: AsyncStream) -> None:
        self._state.check()
        self._done = threading.Event()
        stream.signal("record", self._done)

    def wait(self) -> None:
        stream = self._current()
        if stream is None:
            self.synchronize()
        else:
            self.wait_on(stream)

    def wait_on(self, stream: AsyncStream) -> None:
        done = self._done
        if done is not None:
            stream.launch("wait", lambda: bounded(done, "an event of another stream"))

    def query(self) -> bool:
        self._state.check()
        return self._done is None or self._done.is_set()

    def synchronize(self) -> None:
        if self._done is not None:
            bounded(self._done, "an event")
        self._state.check()


def bounded(done: threading.Event, what: str) -> None:
    if not done.wait(BOUND_S):
        raise TimeoutError(f"waited {BOUND_S:.0f} s for {what}")
