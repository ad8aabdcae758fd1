"""GpuThread: order, rows that are sent back, broken promises, lost devices."""

import queue
import threading

import pytest

from protocol.clock import SystemClock
from protocol.errors import InvariantViolation
from tests.support.fake_engine import DeviceLost, FakeEngine
from worker.api.inputs import RequestInfo
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.gpu_thread import GpuThread
from worker.engine.orders import Ingest, Remove, Step, Unblock
from worker.resources.base import AdmitOutcome


class Bench:
    def __init__(self) -> None:
        self.engine = FakeEngine()
        self.done: queue.SimpleQueue[ExecutingBatch] = queue.SimpleQueue()
        self.fatal: list[BaseException] = []
        self.broke = threading.Event()
        self.thread = GpuThread(self.engine, self.done.put, self._on_fatal, SystemClock())
        self.thread.start()
        self.steps = 0

    def _on_fatal(self, error: BaseException) -> None:
        self.fatal.append(error)
        self.broke.set()

    def step(self, *rows: int) -> ExecutingBatch:
        self.steps += 1
        infos = {r: RequestInfo(r, "decode", {}) for r in rows}
        batch = ExecutingBatch(self.steps, 1, "m/node", "decode", list(rows), infos)
        self.thread.order(Step(batch))
        return batch

    def ingest(self, *rows: int) -> None:
        for r in rows:
            self.thread.order(Ingest("m/node", r, {}))

    def next(self) -> ExecutingBatch:
        return self.done.get(timeout=10)


@pytest.fixture
def bench():
    b = Bench()
    yield b
    assert b.thread.stop()


def test_orders_are_performed_in_order_on_one_thread(bench: Bench) -> None:
    bench.ingest(1, 2)
    first = bench.step(1, 2)
    bench.thread.order(Remove(1))
    second = bench.step(2)
    assert bench.next() is first
    assert bench.next() is second
    assert bench.engine.calls == [
        ("add", "m/node", 1),
        ("add", "m/node", 2),
        ("step", 1, (1, 2)),
        ("remove", 1),
        ("step", 2, (2,)),
    ]
    assert bench.engine.threads == {"gpu"}


@pytest.mark.parametrize("event", ["commit_done", "outputs_ready"])
def test_a_forgotten_event_is_detected_and_nobody_is_left_waiting(bench: Bench, event: str) -> None:
    bench.engine.forgets = {event}
    bench.ingest(1)
    bench.step(1)
    batch = bench.next()
    assert isinstance(batch.error, InvariantViolation)
    assert event in str(batch.error)
    assert batch.commit_done.is_set()
    assert batch.outputs_ready.is_set()
    assert bench.thread.statistics()["missing_events"] == 1


def test_a_step_that_raises_fails_and_the_thread_goes_on(bench: Bench) -> None:
    def breaks(batch: ExecutingBatch) -> None:
        if batch.step == 1:
            raise ValueError("planted")

    bench.engine.on_step = breaks
    bench.ingest(1, 2)
    bench.step(1)
    assert isinstance(bench.next().error, ValueError)
    bench.step(2)
    assert bench.next().error is None
    assert bench.fatal == []


def test_steps_behind_a_failed_one_run_without_its_rows(bench: Bench) -> None:
    def breaks(batch: ExecutingBatch) -> None:
        if batch.step == 1:
            batch.fail(1, "forward", ValueError("planted"))
            batch.drop(1)

    bench.engine.on_step = breaks
    bench.ingest(1, 2)
    bench.step(1, 2)
    bench.step(1, 2)
    assert list(bench.next().failed_requests) == [1]
    second = bench.next()
    assert second.skipped_rids == [1]
    assert list(second.outputs) == [2]


def test_a_refused_step_sends_back_the_steps_behind_it_until_unblocked(bench: Bench) -> None:
    def refuses(batch: ExecutingBatch) -> None:
        if batch.step == 1:
            batch.admit_error = AdmitOutcome(False)

    bench.engine.on_step = refuses
    bench.ingest(1, 2)
    bench.step(1, 2)
    bench.step(1, 2)
    bench.thread.order(Unblock((2,)))
    bench.step(1, 2)
    bench.next()
    assert bench.next().skipped_rids == [1, 2]
    third = bench.next()
    assert third.skipped_rids == [1]
    assert list(third.outputs) == [2]
    assert bench.thread.statistics()["rows_sent_back"] == 3


def test_a_row_that_cannot_be_ingested_fails_alone_in_its_step(bench: Bench) -> None:
    def refuses(rid: int) -> None:
        if rid == 1:
            raise ValueError("bad temperature")

    bench.engine.on_ingest = refuses
    bench.ingest(1, 2)
    bench.step(1, 2)
    batch = bench.next()
    assert batch.failed_requests[1].stage == "ingest"
    assert list(batch.outputs) == [2]


def test_a_lost_device_is_fatal(bench: Bench) -> None:
    def breaks(batch: ExecutingBatch) -> None:
        batch.error = DeviceLost("sticky")

    bench.engine.on_step = breaks
    bench.ingest(1)
    bench.step(1)
    assert bench.broke.wait(10)
    assert isinstance(bench.fatal[0], DeviceLost)


def test_what_the_thread_does_not_expect_is_fatal_too() -> None:
    b = Bench()
    b.step(1)  # never ingested: the fake engine asserts, which no step may do
    b.engine.prepare_batch = lambda batch: (_ for _ in ()).throw(SystemExit)  # type: ignore[method-assign,assignment]
    b.step(1)
    assert b.broke.wait(10)
    assert b.thread.stop()


def test_call_returns_and_raises(bench: Bench) -> None:
    assert bench.thread.call(lambda: threading.current_thread().name) == "gpu"
    with pytest.raises(ValueError, match="planted"):
        bench.thread.call(lambda: int("planted"))


def test_what_was_ordered_before_stop_is_still_done() -> None:
    b = Bench()
    b.ingest(1)
    for _ in range(20):
        b.step(1)
    assert b.thread.stop()
    assert b.done.qsize() == 20
