"""The main thread.

Owns: the conductor link, which rows are in which batch, which batch steps next.
Waits on: the control socket, its mailbox (an eventfd: finished steps, news of owners), the death
    pipe; bounded, `launch_started_event`.
Signals: orders to the GPU thread and the postprocess thread.
Never: touches a stream, a tensor or a resource.
"""

import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import zmq

from protocol import columns, faults
from protocol.channel.base import Channel
from protocol.clock import Clock
from protocol.messages import Beat, Exit, Kind, Leaving, Message, Owners, Row
from protocol.parent import at_end
from worker.api.inputs import RequestInfo
from worker.engine import orders
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.gpu_thread import GpuThread
from worker.engine.mailbox import Mailbox
from worker.engine.orders import Post, Settled
from worker.engine.postprocess_thread import PostprocessThread
from worker.micro_scheduler import decisions
from worker.micro_scheduler.decisions import Decision, PlannedStep, Say
from worker.micro_scheduler.events import StepDone
from worker.micro_scheduler.scheduler import MicroScheduler
from worker.process import exit_status
from worker.process.link import ConductorLink, ConductorSilent, Refused
from worker.process.step_pace import StepPace

PROGRESS_S = 0.5
LAUNCH_WAIT_S = 0.005  # a bound only: the launch is usually over, or a moment away
OVERSTAY_S = 2.0  # after our own grace, if nobody told us to exit

_MAIN = faults.point("worker.main")


@dataclass(slots=True)
class RowInputs:
    """What a step's `RequestInfo`s need of a row: input tokens and parameters."""

    tokens: "array[int]"
    params: Mapping[str, Any]


class WorkerLoop:
    """`figures()`: what the beat's load carries of the engine. `grace_ms`: how long a worker that
    got SIGTERM may drain."""

    def __init__(
        self,
        *,
        channel: Channel,
        link: ConductorLink,
        scheduler: MicroScheduler,
        gpu: GpuThread,
        post: PostprocessThread,
        mailbox: Mailbox[Post],
        figures: Callable[[], dict[str, Any]],
        clock: Clock,
        pace: StepPace,
        log: Callable[[str, str], None],
        death_fd: int | None = None,
        grace_ms: int = 30_000,
    ) -> None:
        self._link = link
        self._scheduler = scheduler
        self._gpu = gpu
        self._post = post
        self._mailbox = mailbox
        self._figures = figures
        self._clock = clock
        self._pace = pace
        self._log = log
        self._death_fd = death_fd
        self._grace_ms = grace_ms
        self._rows: dict[int, RowInputs] = {}
        self._flying: dict[int, ExecutingBatch] = {}
        self._lines: list[Say] = []
        self._steps = 0
        self._progress_at = 0.0
        self._leave_asked = False
        self._leave_by: float | None = None
        self._exit_by: float | None = None
        self._thread = threading.main_thread()
        self._poller = zmq.Poller()
        self._poller.register(channel.pollable, zmq.POLLIN)
        self._poller.register(mailbox.fileno(), zmq.POLLIN)
        if death_fd is not None:
            self._poller.register(death_fd, zmq.POLLIN)

    def ask_to_leave(self) -> None:
        """SIGTERM: drain. Safe in a signal handler."""
        self._leave_asked = True
        self._mailbox.wake()

    @property
    def steps(self) -> tuple[int, int]:
        """Engine steps so far: (submitted, finished). Main thread."""
        return self._steps + len(self._flying), self._steps

    def run(self) -> int:
        """Until there is nothing to work for. Returns the exit status."""
        self._thread = threading.current_thread()
        self._link.open()
        try:
            while True:
                status = self.turn()
                if status is not None:
                    return status
        except Refused as e:
            self._log("error", e.message)
            return exit_status.FENCED
        except ConductorSilent as e:
            self._log("warning", f"{e.message}: leaving")
            return exit_status.OK

    def turn(self) -> int | None:
        """Wait for something, then act on all there is. An exit status ends the worker."""
        assert threading.current_thread() is self._thread, "the loop belongs to one thread"
        if _MAIN.act is not None:
            _MAIN.act()
        ready = dict(self._poller.poll(self._timeout_ms()))
        if self._death_fd is not None and self._death_fd in ready and at_end(self._death_fd):
            self._log("warning", "the process that started this worker is gone: leaving")
            return exit_status.OK
        posted = self._mailbox.take()
        if posted:
            self._let_launch()
        for post in posted:
            self._posted(post)
        for message in self._link.receive():
            self._said(message)
        self._perform(self._scheduler.plan())
        self._report()
        return self._leaving()

    def _timeout_ms(self) -> int:
        waits = [self._link.until_beat()]
        now = self._clock.monotonic()
        if self._flying:
            waits.append(max(0.0, self._progress_at - now))
        waits += [max(0.0, t - now) for t in (self._leave_by, self._exit_by) if t is not None]
        return max(1, int(min(waits) * 1000) + 1)

    # ---- what came

    def _posted(self, post: Post) -> None:
        if isinstance(post, Settled):
            self._lines += [Say(row, Kind.SETTLED, count) for row, count in post.rows]
            return
        if isinstance(post, StepDone):
            del self._flying[post.step]
            self._pace.done(post.step, self._clock.monotonic())
            self._steps += 1
        self._perform(self._scheduler.handle(post))

    def _said(self, message: Message) -> None:
        if isinstance(message, Exit):
            self._exit_by = self._clock.monotonic() + message.grace_ms / 1000
        elif MicroScheduler.takes(message):
            if isinstance(message, Owners) and message.up:
                self._post.order(orders.OwnerUp(message.life, message.endpoint))
            self._perform(self._scheduler.handle(message))  # pyright: ignore[reportArgumentType]
            if isinstance(message, Owners) and not message.up:
                self._post.order(orders.OwnerDown(message.life))

    # ---- what was decided

    def _perform(self, decided: Sequence[Decision]) -> None:
        for d in decided:
            match d:
                case PlannedStep():
                    self._submit(d)
                case Say():
                    self._lines.append(d)
                case decisions.Attach():
                    self._attach(d.row, d.model)
                case decisions.Ingest():
                    params = self._rows[d.row].params
                    self._gpu.order(orders.Ingest(d.node, d.row, params))
                case decisions.Unblock():
                    self._gpu.order(orders.Unblock(d.rows))
                case decisions.CloseEmpty():
                    self._post.order(orders.CloseEmpty(d.row, d.reason))
                case decisions.Remove():
                    self._gpu.order(orders.Remove(d.row))
                    self._post.order(orders.Detach(d.row))
                    self._rows.pop(d.row, None)

    def _attach(self, row: Row, model: str) -> None:
        data = row.inputs.get("tokens", b"")
        self._rows[row.row] = RowInputs(columns.from_bytes("I", data, "tokens"), row.params)
        self._post.order(orders.Attach(row, model))

    def _submit(self, planned: PlannedStep) -> None:
        """Hand a step to the GPU thread. The positions are counted, not read: no value is waited
        for."""
        infos: dict[int, RequestInfo] = {}
        figures = zip(
            planned.rows, planned.spans, planned.positions, planned.outputs, planned.samples,
            strict=True,
        )  # fmt: skip
        for row, (start, stop), position, output, samples in figures:
            known = self._rows[row]
            tokens = known.tokens[start:stop] if stop else ()
            infos[row] = RequestInfo(
                row, planned.walk, known.params, tokens, position, output, samples
            )
        batch = ExecutingBatch(
            step=planned.step,
            batch=planned.batch,
            node_name=planned.node,
            walk=planned.walk,
            request_ids=planned.rows,
            per_request_info=infos,
            submitted_at=self._clock.monotonic(),
        )
        first = not self._flying
        self._flying[planned.step] = batch
        tokens = sum(stop - start or 1 for start, stop in planned.spans)
        self._pace.submitted(planned.step, planned.node, planned.walk, tokens, batch.submitted_at)
        self._gpu.order(orders.Step(batch))
        if first:
            self._let_launch()

    def _let_launch(self) -> None:
        """The GPU thread needs the interpreter to launch: let it, before Python work of our own
        (E20). Bounded: a launch that is waiting for something else must not stop the link."""
        for batch in self._flying.values():
            if not batch.outputs_ready.is_set():  # the one that the GPU thread is at
                batch.launch_started_event.wait(LAUNCH_WAIT_S)
                return

    # ---- what is told

    def _report(self) -> None:
        now = self._clock.monotonic()
        if now >= self._progress_at:
            self._lines += self._scheduler.progress()
            self._progress_at = now + PROGRESS_S
        if self._lines:
            lines, self._lines = self._lines, []
            self._link.report(lines, [s.value if s.kind is Kind.SETTLED else 0 for s in lines])
        self._link.flush()
        self._link.beat(self._beat)
        self._link.check_silence()

    def _beat(self) -> Beat:
        if not self._flying:
            self._scheduler.check()
        age = self._pace.age(self._clock.monotonic())
        load = {
            **self._figures(),
            **self._scheduler.statistics(),
            "step_ms": round(self._pace.expected() * 1000, 3),
        }
        return Beat(self._steps, int(age * 1000), load)

    # ---- the end

    def _leaving(self) -> int | None:
        now = self._clock.monotonic()
        if self._leave_asked and self._leave_by is None:
            self._leave_by = now + self._grace_ms / 1000 + OVERSTAY_S
            self._link.say(Leaving(self._grace_ms))
            self._log("info", f"asked to leave: draining for at most {self._grace_ms} ms")
        idle = self._scheduler.idle and self._post.settled
        told = self._exit_by is not None and (idle or now >= self._exit_by)
        overdue = self._leave_by is not None and now >= self._leave_by
        if not told and not overdue:
            return None
        self._link.bye("told to exit" if told else "the grace is over")
        return exit_status.OK
