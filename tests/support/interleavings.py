"""Interleavings of a whole worker on the cpu-async device, forced by rules on its steps.

A step passes four places: the GPU thread launches it, the compute stream executes it, the
postprocess thread reads it back and finishes it, main handles that it is done and submits more. A
rule holds one of them as far behind the others as the depth allows, and no further, so that nobody
waits for ever: when main has handled all there is and submitted all it can, what is held is let go.
"""

from collections.abc import Callable

from tests.support.sequencer import Sequencer
from tests.support.worker_rig import Rig
from worker.device.base import Device
from worker.device.cpu_async import CpuAsyncDevice
from worker.engine.engine import Engine
from worker.engine.executing_batch import ExecutingBatch


class Pace:
    """How far each place has come, in steps. `ahead`: the most steps that were launched and not yet
    executed; `unread`: executed and not yet read back."""

    def __init__(self, depth: int) -> None:
        self.seq = Sequencer()
        self.depth = depth
        self.launched = self.executed = self.read = 0
        self.submitted = self.finished = 0  # as main knew at the end of its last turn
        self.ahead = self.unread = 0
        self.events: dict[int, object] = {}

    def gate(self, name: str) -> None:
        """The device's gate: counts what has passed."""
        self.seq.gate(name)
        if name.startswith("compute:step "):
            self.ahead = max(self.ahead, self.launched - int(name.rpartition(" ")[2]) + 1)
        elif name.startswith("compute:done "):
            self.executed = int(name.rpartition(" ")[2])
            self.seq.changed()
        elif name == "readback:copy":
            self.unread = max(self.unread, self.executed - self.read)

    def after_turn(self, rig: Rig) -> None:
        self.submitted, self.finished = rig.loop.steps
        self.seq.changed()

    @property
    def main_waits(self) -> bool:
        """Main has handled what was finished, and all that it submitted is launched."""
        return self.finished >= self.read and self.launched >= self.submitted


class PacedEngine(Engine):
    """Marks each step on the compute stream and tells the pace. Warm-up's steps have number 0."""

    def __init__(self, device: CpuAsyncDevice, pace: Pace) -> None:
        super().__init__(device)
        self.async_device = device
        self.pace = pace

    def exec_and_postprocess(self, batch: ExecutingBatch) -> None:
        if not batch.step:
            super().exec_and_postprocess(batch)
            return
        self.pace.seq.gate(f"gpu:step {batch.step}")
        with self.async_device.compute():
            self.async_device.mark(f"step {batch.step}")
        super().exec_and_postprocess(batch)
        with self.async_device.compute():
            self.async_device.mark(f"done {batch.step}")
        self.pace.launched = batch.step
        self.pace.seq.changed()

    def finalize_batch(self, batch: ExecutingBatch) -> None:
        super().finalize_batch(batch)
        self.pace.read = batch.step
        self.pace.seq.changed()


Rule = Callable[[Pace], None]


def free(pace: Pace) -> None:
    """As it comes."""


def compute_behind(pace: Pace) -> None:
    """The GPU thread is ahead: a step is executed once `depth` steps, it and later ones, are
    launched."""

    def may_pass(name: str) -> bool:
        n = int(name.rpartition(" ")[2])
        return pace.launched >= n + pace.depth - 1 or (pace.finished >= n - 1 and pace.main_waits)

    pace.seq.rule("compute:step *", may_pass)


def readback_behind(pace: Pace) -> None:
    """A step is read back once all that can be launched behind it has been executed."""
    pace.seq.rule("readback:copy", lambda _: pace.main_waits and pace.executed >= pace.launched)


def one_by_one(pace: Pace) -> None:
    """The GPU thread is behind: it launches a step once main has handled the one before."""
    pace.seq.rule("gpu:step *", lambda name: pace.finished >= int(name.rpartition(" ")[2]) - 1)


RULES: dict[str, Rule] = {
    r.__name__: r for r in (free, compute_behind, readback_behind, one_by_one)
}


def async_rig(
    rule: Rule = free,
    *,
    depth: int = 2,
    engine: Callable[[CpuAsyncDevice, Pace], Engine] = PacedEngine,
    **how: object,
) -> tuple[Rig, Pace]:
    """A worker on the cpu-async device under a rule. Call `pace.seq.open()` before closing it."""
    pace = Pace(depth)
    device = CpuAsyncDevice(pace.gate)
    rule(pace)

    def make(on: Device) -> Engine:
        assert isinstance(on, CpuAsyncDevice)
        return engine(on, pace)

    rig = Rig(depth=depth, engine=make, device=device, **how)  # type: ignore[arg-type]
    rig.after_turn = lambda: pace.after_turn(rig)
    return rig, pace
