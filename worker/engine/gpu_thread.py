"""The GPU thread.

Owns: the device's compute stream, and every call into the engine that launches or changes state.
Waits on: its order queue.
Signals: what the engine sets on a step (`launch_started_event`, `commit_done`, `completion_event`,
    `outputs_ready`), then hands the step to the postprocess thread.
Never: reads a tensor's value, parses, touches a socket.

Orders are performed one by one, in the order they were given. A step that fails or comes back
blocks its rows: steps of theirs that were queued behind it run without them, until main says
`unblock` (or removes them), so that no step ever builds on one that did not happen.
"""

import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Protocol

import torch

from protocol import faults
from protocol.clock import Clock
from protocol.errors import InvariantViolation
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.orders import Call, GpuOrder, Ingest, Remove, Step, Stop, Unblock

_PREPARE = faults.point("worker.gpu.prepare")
_LAUNCH = faults.point("worker.gpu.launch")


class StepEngine(Protocol):
    """What the thread needs of an engine."""

    def prepare_batch(self, batch: ExecutingBatch) -> None: ...

    def exec_and_postprocess(self, batch: ExecutingBatch) -> None: ...

    def add_request(self, node: str, request_id: int, params: Mapping[str, Any]) -> None: ...

    def remove_request(self, request_id: int) -> None: ...

    def is_fatal(self, error: BaseException) -> bool: ...


class GpuThread:
    """`hand_over` takes each finished step. `on_fatal(error)` is called when the device is lost or
    the thread itself breaks; it does not return in a worker. `threads`: intra-op threads, this
    thread's alone (two teams throttle each other)."""

    def __init__(
        self,
        engine: StepEngine,
        hand_over: Callable[[ExecutingBatch], None],
        on_fatal: Callable[[BaseException], None],
        clock: Clock,
        threads: int = 1,
    ) -> None:
        self._engine = engine
        self._hand_over = hand_over
        self._on_fatal = on_fatal
        self._clock = clock
        self._threads = threads
        self._orders: SimpleQueue[GpuOrder] = SimpleQueue()
        self._blocked: set[int] = set()
        self._unusable: dict[int, BaseException] = {}  # rows whose ingestion failed
        self._counts = dict.fromkeys(
            ("steps", "failed_steps", "rows_sent_back", "missing_events", "failed_removals"), 0
        )
        self._busy_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="gpu", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self._thread.start()

    def order(self, order: GpuOrder) -> None:
        """Queue an order; never waits."""
        self._orders.put(order)

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the GPU thread and wait for its result; raises what it raised."""
        call = Call(function, Future())
        self._orders.put(call)
        return call.result.result()

    def stop(self, timeout_s: float = 10.0) -> bool:
        """Stop after what is queued. False: it is still at work after `timeout_s`."""
        self._orders.put(Stop())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> dict[str, float]:
        return {
            **self._counts,
            "queued_orders": self._orders.qsize(),
            "blocked_rows": len(self._blocked),
            "busy_seconds": self._busy_seconds,
        }

    # ---- the thread

    def _run(self) -> None:
        torch.get_num_threads()  # this thread's pool is set up now, so the next line is the last
        torch.set_num_threads(self._threads)
        try:
            while True:
                order = self._orders.get()
                if isinstance(order, Stop):
                    return
                start = self._clock.monotonic()
                self._perform(order)
                self._busy_seconds += self._clock.monotonic() - start
        except BaseException as e:
            self._on_fatal(e)

    def _perform(self, order: GpuOrder) -> None:
        assert threading.current_thread() is self._thread, "only the GPU thread runs steps"
        match order:
            case Step():
                self._step(order.batch)
            case Ingest():
                try:
                    self._engine.add_request(order.node, order.request_id, order.params)
                except Exception as e:
                    self._die_if_lost(e)
                    self._unusable[order.request_id] = e
            case Unblock():
                self._blocked.difference_update(order.request_ids)
            case Remove():
                self._remove(order.request_id)
            case Call():
                try:
                    order.result.set_result(order.function())
                except BaseException as e:
                    order.result.set_exception(e)
            case Stop():
                pass

    def _remove(self, request_id: int) -> None:
        self._blocked.discard(request_id)
        self._unusable.pop(request_id, None)
        try:
            self._engine.remove_request(request_id)
        except Exception as e:
            self._die_if_lost(e)
            self._counts["failed_removals"] += 1

    def _step(self, batch: ExecutingBatch) -> None:
        self._send_back(batch)
        rows = tuple(batch.request_ids)
        try:
            if _PREPARE.act is not None:
                _PREPARE.act()
            self._engine.prepare_batch(batch)
            if _LAUNCH.act is not None:
                _LAUNCH.act()
            self._engine.exec_and_postprocess(batch)
        except Exception as e:
            batch.error = batch.error or e
        self._check_events(batch)
        if batch.error is not None:
            self._die_if_lost(batch.error)
            self._counts["failed_steps"] += 1
        if batch.error is not None or batch.admit_error is not None:
            self._blocked.update(rows)
        else:
            self._blocked.update(batch.failed_requests, batch.skipped_rids)
        self._counts["steps"] += 1
        self._hand_over(batch)

    def _send_back(self, batch: ExecutingBatch) -> None:
        """Rows that a step before this one did without, or that were never ingested."""
        if not self._blocked and not self._unusable:
            return
        for rid in list(batch.request_ids):
            if rid in self._unusable:
                batch.fail(rid, "ingest", self._unusable[rid])
                batch.drop(rid)
            elif rid in self._blocked:
                self._counts["rows_sent_back"] += 1
                batch.skipped_rids.append(rid)
                batch.drop(rid)

    def _check_events(self, batch: ExecutingBatch) -> None:
        """E23 promises these on every exit. Nobody may be left waiting if it is broken."""
        missing = [
            name
            for name in ("commit_done", "outputs_ready")
            if not getattr(batch, name).is_set()
        ]  # fmt: skip
        if missing:
            self._counts["missing_events"] += 1
            batch.error = batch.error or InvariantViolation(
                f"step {batch.step} of {batch.node_name} came back without {' and '.join(missing)}"
            )
        batch.launch_started_event.set()
        batch.commit_done.set()
        batch.outputs_ready.set()

    def _die_if_lost(self, error: BaseException) -> None:
        if self._engine.is_fatal(error):
            self._on_fatal(error)
