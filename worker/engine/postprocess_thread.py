"""The postprocess thread.

Owns: the device-to-host stream, the rows' output positions, the stream sockets to owners.
Waits on: its mailbox and its sockets; for a step, `outputs_ready` and then `completion_event`.
Signals: frames to owners, then what ended to main.
Never: blocks the GPU thread, launches a step.

Main tells it of a row (`Attach`) before it orders the row's first step, so the row is known when
the step comes from the GPU thread. Per step it copies one column, decides every common stop on it
at once, sends one `Frames` per owner and then posts one `StepDone`, so an end is reported after its
last frame was sent (rule 2).
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
import zmq
from numpy.typing import NDArray

from protocol import faults
from protocol.channel.base import Network
from protocol.clock import Clock
from protocol.errors import Bug, CannotFit, RequestFailed
from protocol.messages import Reason, Row
from protocol.stream_link import Emit
from worker.api.outputs import StepOutputs
from worker.device.base import Device
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.mailbox import Mailbox
from worker.engine.orders import (
    Attach,
    CloseEmpty,
    Detach,
    Halt,
    OwnerDown,
    OwnerUp,
    Post,
    PostOrder,
    Settled,
)
from worker.engine.owner_links import TICK_S, OwnerLinks
from worker.engine.readback import TOKENS, read_tokens
from worker.engine.row_table import RowStream, RowTable
from worker.engine.step_tail import ServedModel, Tail, TailBuilder, wire_error
from worker.micro_scheduler.events import (
    EmptyClosed,
    OwnerGone,
    OwnerStalled,
    Refusal,
    StepDone,
)
from worker.micro_scheduler.stops import stop_ids

_READBACK = faults.point("worker.postprocess.readback")
_FRAMES = faults.point("worker.postprocess.frames")
_TELL = faults.point("worker.postprocess.tell")


class TailEngine(Protocol):
    """What the thread needs of an engine."""

    def check_stop_for_batch(
        self, batch: ExecutingBatch, host_outputs: Any
    ) -> dict[int, set[str]]: ...

    def finalize_batch(self, batch: ExecutingBatch) -> None: ...

    def is_fatal(self, error: BaseException) -> bool: ...


class PostprocessThread:
    """`tell_main` takes what happened; `on_fatal` is called when the device is lost or the thread
    breaks. `models`: name → what ends its streams and what follows."""

    def __init__(
        self,
        *,
        engine: TailEngine,
        device: Device,
        network: Network,
        worker_life: int,
        models: Mapping[str, ServedModel],
        tell_main: Callable[[Post], None],
        on_fatal: Callable[[BaseException], None],
        clock: Clock,
    ) -> None:
        self._engine = engine
        self._device = device
        self._models = models
        self._tell_main = tell_main
        self._on_fatal = on_fatal
        self._clock = clock
        self._mailbox: Mailbox[PostOrder] = Mailbox()
        self._table = RowTable()
        self._tails = TailBuilder(self._table, models)
        self._links = OwnerLinks(network, worker_life)
        self._poller = zmq.Poller()
        self._counts = dict.fromkeys(
            ("steps", "tokens_out", "wasted", "ended", "failed", "frames_without_owner"), 0
        )
        self._halted = False
        self._settled = True
        self._thread = threading.Thread(target=self._run, name="postprocess", daemon=True)

    # ---- any thread

    def start(self) -> None:
        self._thread.start()

    def order(self, order: PostOrder) -> None:
        """Never waits."""
        self._mailbox.put(order)

    def stop(self, timeout_s: float = 10.0) -> bool:
        self._mailbox.put(Halt())
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    @property
    def settled(self) -> bool:
        """Every frame of what was reported so far is acknowledged (a snapshot)."""
        return self._settled

    def statistics(self) -> dict[str, int]:
        return {
            **self._counts,
            **self._links.statistics(),
            "waiting": self._mailbox.statistics()["waiting"],
            "rows": len(self._table),
        }

    # ---- the thread

    def _run(self) -> None:
        torch.get_num_threads()  # this thread's pool is set up now, so the next line is the last
        torch.set_num_threads(1)
        try:
            self._poller.register(self._mailbox.fileno(), zmq.POLLIN)
            while not self._halted:
                self._turn()
            self._links.close()
            self._mailbox.close()
        except BaseException as e:
            self._on_fatal(e)

    def _turn(self) -> None:
        assert threading.current_thread() is self._thread, "sockets belong to one thread"
        # No tick when nothing is unacknowledged: an idle worker sleeps.
        self._poller.poll(None if self._links.idle else int(TICK_S * 1000))
        for order in self._mailbox.take():
            self._perform(order)
        now = self._clock.monotonic()
        self._links.receive(now)
        self._links.tick(now)
        self._settled = self._links.idle
        self._tell_news(now)

    def _perform(self, order: PostOrder) -> None:
        match order:
            case ExecutingBatch():
                self._step(order)
            case Attach():
                self._attach(order.row, order.model)
            case Detach():
                self._table.remove(order.row)
            case CloseEmpty():
                self._close_empty(order.row, order.reason)
            case OwnerUp():
                if self._links.up(order.owner, order.endpoint):
                    self._poll_sockets()
            case OwnerDown():
                if self._links.down(order.owner):
                    self._poll_sockets()
            case Halt():
                self._halted = True

    def _poll_sockets(self) -> None:
        self._poller = zmq.Poller()
        self._poller.register(self._mailbox.fileno(), zmq.POLLIN)
        for channel in self._links.channels:
            self._poller.register(channel.pollable, zmq.POLLIN)

    def _tell_news(self, now: float) -> None:
        news = self._links.news(now)
        if news.settled:
            self._tell_main(Settled(tuple(news.settled)))
        for owner, stalled in news.stalled:
            self._tell_main(OwnerStalled(owner, stalled))
        for owner, why in news.lost:
            self._tell_main(OwnerGone(owner, RequestFailed(f"stream owner: {why}").to_wire()))

    # ---- rows

    def _attach(self, row: Row, model: str) -> None:
        served = self._models[model]
        stream = RowStream.of(row, model, served.graph, stop_ids(row.params, served.eos))
        self._table.add(stream)
        if row.handed:  # rule 10: sent again from `base` by whoever takes over
            tail = Tail()
            first = stream.start - len(row.handed)
            tail.emit(stream, Emit(row.stream, row.attempt, 0, first, row.handed))
            self._send(tail)

    def _close_empty(self, row: int, reason: Reason) -> None:
        stream = self._table.get(row)
        if stream is None:
            raise Bug(f"row {row:#x} is to be closed and was never attached")
        tail = Tail()
        walk = self._models[stream.model].graph.entry
        self._tails.finish(tail, stream, reason, walk=walk, tokens=(), count=stream.start)
        self._send(tail)
        self._tell_main(EmptyClosed(row, tail.ends.get(row), tail.failed.get(row)))

    # ---- steps

    def _step(self, batch: ExecutingBatch) -> None:
        batch.outputs_ready.wait()
        arrived = self._clock.monotonic()
        try:
            if _READBACK.act is not None:
                _READBACK.act()
            rows, tokens = read_tokens(batch, self._device)
        except Exception as e:
            if self._engine.is_fatal(e):
                self._on_fatal(e)
            batch.error = batch.error or e
            rows, tokens = [], np.zeros(0, np.int64)
        done = self._clock.monotonic()
        batch.exec_timings.device = done - arrived
        if _FRAMES.act is not None:
            _FRAMES.act()
        if batch.error is not None or batch.admit_error is not None:
            told = self._unfinished(batch)
        else:
            told = self._finished(batch, rows, tokens)
        batch.exec_timings.postprocess = self._clock.monotonic() - done
        self._finalize(batch, told)
        self._counts["steps"] += 1
        if _TELL.act is not None:
            _TELL.act()
        self._tell_main(told)

    def _unfinished(self, batch: ExecutingBatch) -> StepDone:
        """The whole step failed or was refused: it has no outputs."""
        failed, never = self._failures(batch)
        returned = frozenset(batch.skipped_rids)
        if batch.error is not None:
            for rid in batch.request_ids:
                self._table.end(rid)
            self._counts["failed"] += len(batch.request_ids)
            return StepDone(
                batch.step, failed=failed, never=never, returned=returned,
                error=wire_error(batch.error, "step", batch),
            )  # fmt: skip
        what = f"{batch.failed_resource}: {getattr(batch.admit_error, 'detail', '')}"
        refusal = Refusal(CannotFit(what).to_wire())
        return StepDone(batch.step, failed=failed, never=never, returned=returned, refusal=refusal)

    def _finished(
        self, batch: ExecutingBatch, rows: list[int], tokens: NDArray[np.int64]
    ) -> StepDone:
        stopped = self._check_stop(batch, rows, tokens)
        failed, never = self._failures(batch)
        if failed or never:
            kept = [i for i, r in enumerate(rows) if r not in failed and r not in never]
            rows, tokens = [rows[i] for i in kept], tokens[kept]
        with_output = set(rows)
        silent = [r for r in batch.request_ids if r not in with_output]
        silent = [r for r in silent if r not in failed and r not in never]
        tail = self._tails.of_step(batch, rows, tokens, stopped, silent)
        self._send(tail)
        self._counts["tokens_out"] += tail.tokens
        self._counts["wasted"] += tail.wasted
        self._counts["ended"] += len(tail.ends)
        self._counts["failed"] += len(tail.failed)
        failed.update(tail.failed)
        return StepDone(
            batch.step, tail.ends, failed, never, frozenset(batch.skipped_rids)
        )  # fmt: skip

    def _check_stop(
        self, batch: ExecutingBatch, rows: Sequence[int], tokens: NDArray[np.int64]
    ) -> dict[int, set[str]]:
        """The author's own stops; the engine asks only submodules that have one."""
        if not rows:
            return {}
        host = StepOutputs(rows, {TOKENS: torch.as_tensor(tokens)})
        with self._device.readback():
            return self._engine.check_stop_for_batch(batch, host)

    def _failures(
        self, batch: ExecutingBatch
    ) -> tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]:
        """(failed, never): what fails alone, and what admission will never grant."""
        failed: dict[int, dict[str, Any]] = {}
        never: dict[int, dict[str, Any]] = {}
        for rid, f in batch.failed_requests.items():
            self._table.end(rid)
            kind = never if isinstance(f.error, CannotFit) else failed
            kind[rid] = wire_error(f.error, f.stage, batch)
        self._counts["failed"] += len(failed) + len(never)
        return failed, never

    def _finalize(self, batch: ExecutingBatch, told: StepDone) -> None:
        """Publishes, and observes the timings. Whoever fails in it has sent its frames already."""
        before = set(batch.failed_requests)
        try:
            self._engine.finalize_batch(batch)
        except Exception as e:
            if self._engine.is_fatal(e):
                self._on_fatal(e)
            for rid in batch.request_ids:
                batch.fail(rid, "finalize", e)
        for rid, f in batch.failed_requests.items():
            if rid not in before and rid not in told.ends:
                self._table.end(rid)
                told.failed[rid] = wire_error(f.error, f.stage, batch)

    def _send(self, tail: Tail) -> None:
        """One `Frames` per owner."""
        self._settled = False  # before main learns of what these frames end
        now = self._clock.monotonic()
        for owner, frame in tail.frames.items():
            if not self._links.emit(owner, frame.rows, frame.emits, now, frame.plain):
                self._counts["frames_without_owner"] += 1
