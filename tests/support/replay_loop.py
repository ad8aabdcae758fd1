"""A decode loop of replayed graphs over a few slots: the shape of planning ahead (E24, E30 to E34),
small enough to read, with its bugs as switches.

Three threads, as in a worker. The planner waits for `commit_done` of the step before and for its
slot's fence, writes the slot's host buffer, and copies it to the slot's static input on the plan
stream. The launcher replays the slot's graph behind that copy, clones the outputs out of the
static buffer, and records the completion event, which is the slot's fence too. The reader reads the
clone behind the completion event. The model is the reference rule over a history on the device, so
a step that ran with another step's plan shows as a wrong token.

Gate points beside the device's own: "planner:fence N" before the fence of step N's slot is waited
for; on the streams "plan:write N" and "plan:written N" around the copy, "compute:step N" and
"compute:done N" around the replay.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import torch

from worker.device.async_graph import AsyncGraph
from worker.device.async_streams import AsyncEvent
from worker.device.cpu_async import CpuAsyncDevice
from worker.models.reference import next_tokens, signed
from worker.models.reference_hash import mix

BOUND_S = 20.0


class PlantedBug(Enum):
    NO_FENCE = auto()  # a slot is planned again without waiting for its last step
    LIVE_SLOT = auto()  # slots share their static input, so the next plan goes on the live one
    EVENT_EARLY = auto()  # the completion event is recorded before the launch
    READ_EARLY = auto()  # the reader does not wait for the completion event
    NO_CLONE = auto()  # outputs are handed out as the static buffer
    NO_PLAN_WAIT = auto()  # the replay does not wait for the plan's copy


@dataclass(slots=True)
class Slot:
    """`host` and `lengths` [B] int64: a step's plan, on the host and as the graph's input."""

    host: torch.Tensor
    lengths: torch.Tensor
    graph: AsyncGraph
    fence: AsyncEvent


@dataclass(slots=True)
class Launched:
    slot: Slot
    planned: AsyncEvent
    tokens: torch.Tensor | None = None
    completion: AsyncEvent | None = None


class ReplayLoop:
    """`prompts`: one row each. `gate`: as the device's."""

    def __init__(
        self,
        device: CpuAsyncDevice,
        prompts: Sequence[Sequence[int]],
        steps: int,
        gate: Callable[[str], None],
        *,
        slots: int = 2,
        bug: PlantedBug | None = None,
    ) -> None:
        self.device = device
        self.steps = steps
        self.bug = bug
        self.plan_stream = device.new_stream("plan")
        self.launches: list[Launched] = []
        self.tokens: list[list[int]] = []  # by step
        self._gate = gate
        self._prompts = prompts
        self._planned = self._committed = 0
        self._errors: list[BaseException] = []
        self._cv = threading.Condition()
        width = max(map(len, prompts)) + steps + 1
        self.history = torch.zeros(len(prompts), width, dtype=torch.int64)
        for i, p in enumerate(prompts):
            self.history[i, : len(p)] = torch.tensor(p)
        self.slots: list[Slot] = []
        for _ in range(slots):
            shared = self.slots[0] if self.slots and bug is PlantedBug.LIVE_SLOT else None
            self.slots.append(self._slot(shared))

    def run(self) -> list[list[int]]:
        """Each row's tokens. Raises what a thread raised first."""
        threads = [
            threading.Thread(target=self._guarded, args=(work,), name=work.__name__)
            for work in (self._plan_all, self._launch_all, self._read_all)
        ]
        for t in threads:
            t.start()
        for t in threads:
            t.join()
        if self._errors:
            raise self._errors[0]
        return [list(row) for row in zip(*self.tokens, strict=True)]

    def completed(self, step: int) -> bool:
        """Whether the step's completion event says that it is done."""
        if step >= len(self.launches):
            return False
        event = self.launches[step].completion
        return event is not None and event.query()

    # ---- the three threads

    def _plan_all(self) -> None:
        for step in range(self.steps):
            self._until(lambda step=step: self._committed >= step)
            slot = self.slots[step % len(self.slots)]
            if self.bug is not PlantedBug.NO_FENCE:
                self._gate(f"planner:fence {step}")
                slot.fence.synchronize()
            for i, p in enumerate(self._prompts):
                slot.host[i] = len(p) + step
            planned = self.device.new_event()
            with self.device.stream(self.plan_stream):
                self.device.mark(f"write {step}")
                slot.lengths.copy_(slot.host)
                self.device.mark(f"written {step}")
                planned.record()
            self.launches.append(Launched(slot, planned))
            self._advance(planned=1)

    def _launch_all(self) -> None:
        for step in range(self.steps):
            self._until(lambda step=step: self._planned > step)
            launch = self.launches[step]
            completion = self.device.new_event()
            with self.device.compute():
                if self.bug is not PlantedBug.NO_PLAN_WAIT:
                    launch.planned.wait()
                if self.bug is PlantedBug.EVENT_EARLY:
                    completion.record()
                self.device.mark(f"step {step}")
                launch.slot.graph.replay()
                tokens: torch.Tensor = launch.slot.graph.outputs
                launch.tokens = tokens if self.bug is PlantedBug.NO_CLONE else tokens.clone()
                self.device.mark(f"done {step}")
                if self.bug is not PlantedBug.EVENT_EARLY:
                    completion.record()
            launch.completion = launch.slot.fence = completion
            self._advance(committed=1)

    def _read_all(self) -> None:
        for step in range(self.steps):
            self._until(lambda step=step: self._committed > step)
            launch = self.launches[step]
            assert launch.tokens is not None
            read_early = self.bug is PlantedBug.READ_EARLY
            after = self.device.new_event() if read_early else launch.completion
            with self.device.readback():
                self.tokens.append(self.device.to_host(launch.tokens, after).tolist())

    # ---- inside

    def _slot(self, shared: Slot | None) -> Slot:
        rows = len(self._prompts)
        host = torch.zeros(rows, dtype=torch.int64)
        lengths = torch.zeros(rows, dtype=torch.int64) if shared is None else shared.lengths

        def step() -> torch.Tensor:
            tokens = next_tokens(self.history, lengths, signed(mix(0)), 0)
            self.history.scatter_(1, lengths[:, None], tokens[:, None])
            return tokens

        return Slot(host, lengths, self.device.capture(step), self.device.new_event())

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as e:
            with self._cv:
                self._errors.append(e)
                self._cv.notify_all()

    def _until(self, reached: Callable[[], bool]) -> None:
        with self._cv:
            if not self._cv.wait_for(lambda: self._errors or reached(), BOUND_S):
                raise TimeoutError("the other threads of the loop are stuck")
            if self._errors:
                raise self._errors[0]

    def _advance(self, planned: int = 0, committed: int = 0) -> None:
        with self._cv:
            self._planned += planned
            self._committed += committed
            self._cv.notify_all()
