"""A worker whose inner life is real: its MicroScheduler decides, only the engine is simulated.

Three moves, in any order: the conductor's messages arrive (`take`), the engine performs its next
order (`engine`), main hears of the oldest step that is done (`main`). The engine's pool has pages
of 16 tokens; it computes the keyed hash of `conductor_sim_worker`, so that every token is known.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from protocol import PROTOCOL_VERSION, columns
from protocol.graph import ModelSpec, spec_to_wire
from protocol.messages import (
    FLAG_CLOSES,
    FLAG_END,
    ROW_TRIAL,
    Beat,
    Exit,
    Frames,
    Hello,
    Kind,
    Leave,
    Message,
    Reason,
    Refuse,
    Report,
    Row,
    Welcome,
)
from tests.support.conductor_sim_worker import POISON, Crash, advance
from worker.micro_scheduler.decisions import (
    Attach,
    CloseEmpty,
    Decision,
    Ingest,
    PlannedStep,
    Remove,
    Say,
    Unblock,
)
from worker.micro_scheduler.events import EmptyClosed, OwnerStalled, Refusal, RowEnd, StepDone
from worker.micro_scheduler.scheduler import MicroScheduler

PAGE = 16


@dataclass
class EngineRow:
    """What the engine and the postprocess thread hold. `state`: hash of the tokens consumed."""

    wire: Row
    inputs: list[int]
    state: int
    stop: int
    consumed: int = 0
    computed: int = 0  # outputs, those that nobody wanted too
    sent: int = 0
    over: bool = False
    ingested: bool = False
    last: int = 0

    @property
    def pages(self) -> int:
        return -(-self.consumed // PAGE)

    @property
    def base(self) -> int:
        return self.wire.base[0]

    @property
    def on_trial(self) -> bool:
        return bool(self.wire.flags & ROW_TRIAL) and self.sent < 4


class SchedulerWorker:
    """`steps` counts those performed. `make`: the scheduler, or a broken one."""

    def __init__(
        self,
        name: str,
        life: int,
        spec: ModelSpec,
        depth: int,
        make: Callable[..., MicroScheduler] = MicroScheduler,
    ) -> None:
        self.name, self.life, self.spec = name, life, spec
        self.scheduler = make(depth, {spec.model: frozenset()})
        self.rows: dict[int, EngineRow] = {}
        self.orders: deque[Decision] = deque()
        self.done: deque[StepDone | EmptyClosed] = deque()
        self.blocked: set[int] = set()
        self.out: list[tuple[int, Message]] = []  # (owner life or 0 for the conductor, message)
        self.ends: Counter[int] = Counter()
        self.left: set[int] = set()  # rows that were asked to leave
        self.preempted: list[Row] = []
        self.unread: Counter[int] = Counter()  # row → frames that its owner has not taken
        self.frames: dict[int, tuple[Frames, list[int]]] = {}  # by identity → rows in it
        self.steps = 0
        self.exiting = False
        self.fail_next: set[int] = set()
        self.skip_next: set[int] = set()

    def hello(self, ends: list[list[Any]]) -> Hello:
        inventory = {**self.scheduler.inventory(), "ends": ends}
        specs = [spec_to_wire(self.spec)]
        return Hello(
            "worker", self.name, self.life, [PROTOCOL_VERSION], specs=specs, inventory=inventory
        )

    # ---- main

    def take(self, m: Message) -> None:
        if MicroScheduler.takes(m):
            if isinstance(m, Leave):
                self.left.update(m.row)
            self._decide(m)
        elif isinstance(m, Exit):
            assert not self.scheduler.live, "a worker is let go with rows"
            self.exiting = True
        else:
            assert isinstance(m, Welcome | Beat | Refuse), m

    def main(self) -> bool:
        """Main hears of the oldest step that is done."""
        if not self.done:
            return False
        self._decide(self.done.popleft())
        return True

    def stall(self, owner: int, stalled: bool) -> None:
        self._decide(OwnerStalled(owner, stalled))

    def progress(self) -> None:
        self._perform(self.scheduler.progress())

    def _decide(self, event: Any) -> None:
        self._perform(self.scheduler.handle(event))
        self._perform(self.scheduler.plan())
        self.scheduler.check()

    def _perform(self, decided: Sequence[Decision]) -> None:
        for d in decided:
            match d:
                case Say():
                    self._say(d)
                case Attach(wire):
                    assert wire.row not in self.rows, "a row comes once"
                    inputs = list(columns.from_bytes("I", wire.inputs["tokens"], "tokens"))
                    stop = wire.params.get("stop_token_ids", [-1])[0]
                    self.rows[wire.row] = EngineRow(wire, inputs, wire.params["seed"], stop)
                case CloseEmpty(row, reason):
                    r = self.rows[row]
                    r.over = True
                    self._send({r.wire.owner: [(r, [], reason)]})
                    self.done.append(EmptyClosed(row, RowEnd(reason, r.base, True)))
                case _:
                    if isinstance(d, PlannedStep):
                        assert not self.left.intersection(d.rows), "a step planned after Leave"
                    self.orders.append(d)

    def _say(self, d: Say) -> None:
        assert not self.ends[d.row], f"{d.kind.name} of row {d.row:#x} after its end"
        self.ends[d.row] += d.kind.ends
        if d.kind is Kind.PREEMPTED:
            oldest = min(r for r in self.rows if not self.ends[r] or r == d.row)
            assert d.row != oldest, "the oldest row gave way"
            self.preempted.append(self.rows[d.row].wire)
        self._report(d.row, d.kind, d.value, d.extra)
        if d.kind.ends:
            self._settle(d.row)

    def _report(self, row: int, kind: Kind, value: int, extra: Any = None) -> None:
        report = Report(
            columns.u64([row]), columns.u8([kind]), columns.u32([value]), columns.u32([0]),
            {0: extra} if extra else {},
        )  # fmt: skip
        self.out.append((0, report))

    # ---- the engine, and what is said to owners

    def engine(self) -> bool:
        """Perform the next order. Raises `Crash` in a step with a poisoned row."""
        if not self.orders:
            return False
        order = self.orders.popleft()
        match order:
            case Ingest(row):
                self.rows[row].ingested = True
            case Unblock(rows):
                self.blocked -= set(rows)
            case Remove(row):
                self.blocked.discard(row)
                del self.rows[row]
            case PlannedStep():
                self.done.append(self._step(order))
            case _:
                raise AssertionError(order)
        return True

    @property
    def pages_used(self) -> int:
        return sum(r.pages for r in self.rows.values())

    def _step(self, d: PlannedStep) -> StepDone:
        self.steps += 1
        rows = [r for r in d.rows if r not in self.blocked and r not in self.skip_next]
        failed = {r: {"code": "failed", "message": "planted"} for r in rows if r in self.fail_next}
        self.blocked |= failed.keys()
        for r in failed:
            self.rows[r].over = True
        rows = [r for r in rows if r not in failed]
        returned = frozenset(set(d.rows) - set(rows) - failed.keys())
        self.blocked |= returned
        self.fail_next -= set(d.rows)
        self.skip_next -= set(d.rows)
        at = {r: i for i, r in enumerate(d.rows)}
        spans = {r: (d.spans[at[r]][1] - d.spans[at[r]][0]) or 1 for r in rows}
        self._check_step(d, rows, at)
        need = sum(-(-(self.rows[r].consumed + n) // PAGE) for r, n in spans.items())
        need -= sum(self.rows[r].pages for r in rows)
        if self.pages_used + need > self.spec.pages:
            self.blocked |= set(rows)
            refusal = Refusal({"code": "cannot_fit", "message": f"needs {need} pages"})
            return StepDone(d.step, failed=failed, returned=returned, refusal=refusal)
        frames: dict[int, list[tuple[EngineRow, list[int], Reason]]] = {}
        ends: dict[int, RowEnd] = {}
        for r in rows:
            self._advance(d, at[r], spans[r], frames, ends)
        self._send(frames)
        return StepDone(d.step, ends, failed, {}, returned)

    def _check_step(self, d: PlannedStep, rows: list[int], at: dict[int, int]) -> None:
        here = [self.rows[r] for r in rows]
        if any(POISON in r.inputs for r in here):
            raise Crash
        assert all(r.ingested for r in here)
        trial = {bool(r.wire.flags & ROW_TRIAL) for r in here if not r.over}
        assert trial != {True, False} or not any(r.on_trial for r in here), "beside a trial"
        for row, r in zip(rows, here, strict=True):
            i = at[row]
            assert d.positions[i] == r.consumed, f"position {d.positions[i]}, not {r.consumed}"
            assert d.outputs[i] == r.base + r.computed
            assert d.spans[i] == (0, 0) or d.spans[i][0] == r.consumed, "chunks follow one another"

    def _advance(
        self, d: PlannedStep, i: int, n: int, frames: dict[int, Any], ends: dict[int, RowEnd]
    ) -> None:
        row = self.rows[d.rows[i]]
        fed = row.inputs[row.consumed : row.consumed + n] if d.spans[i][1] else [row.last]
        for token in fed:
            row.state = advance(row.state, token)
        row.consumed += n
        if not d.samples[i]:
            return
        row.last = (row.state >> 33) % POISON
        row.computed += 1
        assert row.computed <= row.wire.max_steps, "a step beyond max_steps"
        if row.over:
            return
        row.sent += 1
        reason = Reason.NONE
        if row.last == row.stop:
            reason = Reason.STOP
        elif row.sent == row.wire.max_steps:
            reason = Reason.LENGTH
        frames.setdefault(row.wire.owner, []).append((row, [row.last], reason))
        if reason:
            row.over = True
            ends[row.wire.row] = RowEnd(reason, row.base + row.sent, True)

    def _send(self, frames: dict[int, list[tuple[EngineRow, list[int], Reason]]]) -> None:
        for owner, parts in frames.items():
            message = Frames(
                stream=columns.u64(r.wire.stream for r, _, _ in parts),
                attempt=columns.u16(r.wire.attempt for r, _, _ in parts),
                channel=columns.u8([0] * len(parts)),
                first=columns.u32(r.base + r.sent - len(t) for r, t, _ in parts),
                count=columns.u32(len(t) for _, t, _ in parts),
                flags=columns.u8(FLAG_END | FLAG_CLOSES if why else 0 for _, _, why in parts),
                reason=columns.u8(why for _, _, why in parts),
                tokens=columns.u32(x for _, t, _ in parts for x in t),
            )
            numbers = [r.wire.row for r, _, _ in parts]
            self.frames[id(message)] = message, numbers
            self.unread.update(numbers)
            self.out.append((owner, message))

    def acknowledged(self, m: Frames) -> None:
        """The owner took these frames; a repeat is acknowledged once."""
        _, rows = self.frames.pop(id(m), (m, []))
        for row in rows:
            self.unread[row] -= 1
            self._settle(row)

    def _settle(self, row: int) -> None:
        if self.ends[row] and not self.unread[row]:
            self._report(row, Kind.SETTLED, 0)

    # ---- at rest

    @property
    def at_rest(self) -> bool:
        return not self.rows and not self.orders and not self.done and self.scheduler.idle
