"""Hazards planted in a whole worker: real threads, each under the interleaving that shows it."""

import threading

import pytest
import torch

from protocol.clock import SystemClock
from tests.support.engine_harness import one_node
from tests.support.interleavings import Pace, PacedEngine, async_rig
from tests.support.toy_decoder import ToyDecoder, toy_decoder
from worker.api.inputs import RequestInfo
from worker.device.async_launch import ValueRead
from worker.device.async_streams import AsyncDeviceError
from worker.device.base import DeviceEvent
from worker.device.cpu_async import CpuAsyncDevice
from worker.device.poison import PoisonRead
from worker.engine.engine import Engine
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.gpu_thread import GpuThread
from worker.engine.orders import Ingest, Step
from worker.models.reference_hash import reference_tokens

ROWS = {1: [40, 41], 2: [50] * 17}
TOKENS = 9


class Watched(PacedEngine):
    """Keeps each step's completion event, as the rule below needs it."""

    def exec_and_postprocess(self, batch: ExecutingBatch) -> None:
        early = self.device.new_event()
        with self.device.compute():
            early.record()
        super().exec_and_postprocess(batch)
        batch.completion_event = self.event_of(batch, early)
        self.pace.events[batch.step] = batch.completion_event
        self.pace.seq.changed()

    def event_of(self, batch: ExecutingBatch, early: DeviceEvent) -> DeviceEvent:
        """`early` was recorded before the launch."""
        return batch.completion_event


class EventTooEarly(Watched):
    def event_of(self, batch: ExecutingBatch, early: DeviceEvent) -> DeviceEvent:
        return early


class ReadTooEarly(Watched):
    """There is nothing to wait for: the values are read once the outputs are ready."""

    def event_of(self, batch: ExecutingBatch, early: DeviceEvent) -> DeviceEvent:
        return self.device.new_event()


def compute_behind_its_reader(pace: Pace) -> None:
    """A step is executed once its reader has read, or waits for its event in earnest."""

    def may_pass(name: str) -> bool:
        n = int(name.rpartition(" ")[2])
        event = pace.events.get(n)
        if event is None:
            return False  # not launched to the end yet
        if event.query():
            return pace.seq.passed("readback:synchronize") >= n  # behind the copy
        return pace.seq.reached("readback:wait") >= n

    pace.seq.rule("compute:step *", may_pass)


def run(engine: type[Watched]):
    r, pace = async_rig(compute_behind_its_reader, engine=engine)
    try:
        r.run([r.row(i, p, TOKENS) for i, p in ROWS.items()])
        try:
            r.until_ended(*ROWS)
        except AssertionError:
            if not r.fatal:
                raise
        return {i: r.owner.tokens(i) for i in ROWS}, list(r.fatal)
    finally:
        pace.seq.open()
        r.fatal.clear()
        r.close()


def test_the_worker_as_it_is_waits_for_its_events() -> None:
    assert run(Watched) == ({i: reference_tokens(p, TOKENS) for i, p in ROWS.items()}, [])


@pytest.mark.parametrize("planted", [EventTooEarly, ReadTooEarly])
def test_a_step_that_is_read_too_early_ends_the_worker(planted: type[Watched]) -> None:
    tokens, fatal = run(planted)
    assert tokens == {1: [], 2: []}  # and no wrong token was sent
    assert isinstance(fatal[0], PoisonRead)


class BreaksTheDevice(PacedEngine):
    """Planted: a kernel of the third step fails on the device."""

    def exec_and_postprocess(self, batch: ExecutingBatch) -> None:
        if batch.step == 3:
            with self.device.compute():
                torch.zeros(1).index_select(0, torch.tensor([9]))
        super().exec_and_postprocess(batch)


def test_a_failed_kernel_ends_the_worker_and_nobody_hangs() -> None:
    r, pace = async_rig(engine=BreaksTheDevice)
    try:
        r.run([r.row(i, p, TOKENS) for i, p in ROWS.items()])
        with pytest.raises(AssertionError, match="a thread broke"):
            r.until_ended(*ROWS)
        lost = r.fatal[0]
        assert isinstance(lost, AsyncDeviceError)
        assert isinstance(lost.__cause__, IndexError)
        assert r.worker.engine.is_fatal(lost)
        for i, p in ROWS.items():
            sent = r.owner.tokens(i)
            assert sent == reference_tokens(p, len(sent))
    finally:
        pace.seq.open()
        r.fatal.clear()
        r.close()


# ---- no value is read on the GPU thread (E26)

STAGES = ("prepare_inputs", "preprocess", "forward_batched", "postprocess")


class Reads(ToyDecoder):
    """Planted: request 2's author reads a value in one stage. `check_stop` may."""

    def __init__(self, stage: str) -> None:
        super().__init__()
        self.stage = stage
        self.seen: list[int] = []

    def maybe(self, stage: str, infos, x: torch.Tensor) -> None:
        if stage == self.stage and any(i.request_id == 2 for i in infos):
            self.seen.append(int(x.sum()))

    def prepare_inputs(self, info):
        self.maybe("prepare_inputs", [info], self.embed.weight)
        return super().prepare_inputs(info)

    def preprocess(self, engine, inputs):
        made = super().preprocess(engine, inputs)
        self.maybe("preprocess", engine.infos, made["tokens"])
        return made

    def forward_batched(self, engine, **tensors):
        self.maybe("forward_batched", engine.infos, tensors["tokens"])
        return super().forward_batched(engine, **tensors)

    def postprocess(self, info, outputs):
        self.maybe("postprocess", [info], outputs["tokens"][0])
        return outputs

    def check_stop(self, info, outputs):
        self.maybe("check_stop", [info], outputs["tokens"][0])
        return set()


@pytest.mark.parametrize("stage", [*STAGES, "check_stop"])
def test_the_device_itself_refuses_a_value_read_on_the_gpu_thread(stage: str) -> None:
    device = CpuAsyncDevice()
    engine = Engine(device)
    done: list[ExecutingBatch] = []
    arrived = threading.Event()

    def hand_over(batch: ExecutingBatch) -> None:
        done.append(batch)
        arrived.set()

    fatal: list[BaseException] = []
    gpu = GpuThread(engine, hand_over, fatal.append, SystemClock())
    gpu.start()
    try:
        reads = Reads(stage)
        model = one_node(reads, *toy_decoder().resources, vocab=40)
        gpu.call(lambda: engine.load_model("m", model, pages=9))
        infos = {r: RequestInfo(r, "prefill", {}, [3, 4 + r]) for r in (1, 2, 3)}
        for r in infos:
            gpu.order(Ingest("m/decoder", r, {}))
        batch = ExecutingBatch(1, 1, "m/decoder", "prefill", list(infos), dict(infos))
        gpu.order(Step(batch))
        assert arrived.wait(20)
        batch.completion_event.synchronize()
        engine.check_stop_for_batch(batch, batch.outputs)
        assert batch.error is None
        if stage == "check_stop":
            assert not batch.failed_requests
            assert len(reads.seen) == 1
        else:
            assert list(batch.failed_requests) == [2]
            assert isinstance(batch.failed_requests[2].error, ValueRead)
            assert not reads.seen
            assert sorted(batch.outputs) == [1, 3]
    finally:
        assert gpu.stop()
        engine.shutdown()
    assert not fatal
