"""A conductor, an engine and a postprocess thread around a MicroScheduler, in one simple object.

It performs decisions as the threads do (orders in sequence, blocked rows, pages of one token each)
and checks on the way what no decision may ever do.
"""

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protocol import columns
from protocol.messages import Kind, Leave, Open, Owners, Reason, Row, Run
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
from worker.micro_scheduler.events import EmptyClosed, Refusal, RowEnd, StepDone
from worker.micro_scheduler.scheduler import Event, MicroScheduler

OWNER = 7
NODE = "m/node"
OTHER_NODE = "n/node"  # another model, with a pool of its own
EOS = 99


@dataclass(slots=True)
class SimRow:
    """What the engine and the postprocess thread hold of a row."""

    row: Row
    model: str
    stops_at: int  # outputs after which it stops by itself
    consumed: int = 0
    outputs: int = 0  # computed by the engine
    sent: int = 0
    over: bool = False
    ingested: bool = False


@dataclass(slots=True)
class Sim:
    """`pages`: of each model's pool."""

    depth: int = 2
    pages: int = 1 << 30
    scheduler: MicroScheduler = field(init=False)
    rows: dict[int, SimRow] = field(default_factory=dict[int, SimRow])
    stops_at: dict[int, int] = field(default_factory=dict[int, int])
    queue: deque[Decision] = field(default_factory=deque[Decision])
    done: deque[StepDone] = field(default_factory=deque[StepDone])
    blocked: set[int] = field(default_factory=set[int])
    said: list[Say] = field(default_factory=list[Say])
    ends: Counter[int] = field(default_factory=Counter[int])
    removed: set[int] = field(default_factory=set[int])
    steps: list[PlannedStep] = field(default_factory=list[PlannedStep])
    in_flight: dict[int, PlannedStep] = field(default_factory=dict[int, PlannedStep])
    fail_next: set[int] = field(default_factory=set[int])
    skip_next: set[int] = field(default_factory=set[int])

    def __post_init__(self) -> None:
        self.scheduler = MicroScheduler(self.depth, {"m": frozenset({EOS}), "n": frozenset()})
        self.give(Owners(OWNER, "memory://owner", True))

    # ---- the conductor

    def give(self, event: Event, plan: bool = True) -> None:
        self._take(self.scheduler.handle(event))
        if plan:
            self._take(self.scheduler.plan())
        self.scheduler.check()

    def open(
        self, batch: int = 100, priority: int = 0, limit: int | None = None, node: str = NODE
    ) -> None:
        self.give(Open(batch, node, "decode", priority, 256, limit))

    def run(
        self, batch: int, *rows: Row | int, priority: int = 0, plan: bool = True, node: str = NODE
    ) -> None:
        self.give(Run(batch, node, "prefill", priority, list(rows)), plan)

    def leave(self, *rows: int) -> None:
        self.give(Leave(columns.u64(rows), columns.u8([0] * len(rows))))

    # ---- the engine

    def step(self) -> bool:
        """Let the GPU thread come to its next step and do it. False: it has none."""
        while self.queue:
            order = self.queue.popleft()
            match order:
                case Ingest():
                    assert order.row not in self.removed
                    self.rows[order.row].ingested = True
                case Unblock():
                    self.blocked -= set(order.rows)
                case Remove():
                    self.blocked.discard(order.row)
                    self._removed(order.row)
                case PlannedStep():
                    self.done.append(self._execute(order))
                    return True
                case _:
                    raise AssertionError(order)
        return False

    def finish(self) -> bool:
        """Tell the scheduler of the oldest step that was done."""
        if not self.done:
            return False
        done = self.done.popleft()
        del self.in_flight[done.step]
        self.give(done)
        return True

    def turn(self) -> bool:
        return (self.step() or bool(self.done)) and self.finish()

    def settle(self, most: int = 100_000) -> None:
        """Until nothing happens any more."""
        for _ in range(most):
            if not self.turn() and not self.queue:
                return
        raise AssertionError("it never comes to rest")

    def settle_until(self, reached: Callable[[], bool], most: int = 10_000) -> None:
        for _ in range(most):
            if reached():
                return
            self.turn()
        raise AssertionError("it never comes to that")

    @property
    def used(self) -> int:
        return self.used_of("m") + self.used_of("n")

    def used_of(self, model: str) -> int:
        left = (r for n, r in self.rows.items() if n not in self.removed)
        return sum(r.consumed for r in left if r.model == model)

    def kinds(self, row: int) -> list[Kind]:
        return [s.kind for s in self.said if s.row == row]

    def last(self, row: int) -> Say:
        return [s for s in self.said if s.row == row][-1]

    # ---- inside

    def _take(self, decided: Sequence[Decision]) -> None:
        for d in decided:
            match d:
                case Say():
                    self._say(d)
                case Attach():
                    assert d.row.row not in self.rows, "a row is attached once"
                    self.rows[d.row.row] = SimRow(
                        d.row, d.model, self.stops_at.get(d.row.row, 1 << 30)
                    )
                case CloseEmpty():
                    end = RowEnd(d.reason, self._base(d.row), True)
                    self.give(EmptyClosed(d.row, end), plan=False)
                case PlannedStep():
                    self._planned(d)
                    self.queue.append(d)
                case Remove():
                    flying = [s.step for s in self.in_flight.values() if d.row in s.rows]
                    assert not flying, f"row {d.row} is removed while steps {flying} hold it"
                    assert self.ends[d.row] == 1
                    self.queue.append(d)
                case Ingest() | Unblock():
                    self.queue.append(d)

    def _say(self, d: Say) -> None:
        assert self.ends[d.row] == 0, f"{d.kind!r} of row {d.row} after its end"
        self.said.append(d)
        self.ends[d.row] += d.kind.ends

    def _planned(self, d: PlannedStep) -> None:
        assert len(set(d.rows)) == len(d.rows), "a row twice in one step"
        assert not [r for r in d.rows if self.ends[r]], "a row in a step after its end was known"
        self.in_flight[d.step] = d
        assert len(self.in_flight) <= self.depth
        assert [s.step for s in self.steps] == list(range(1, d.step))
        self.steps.append(d)

    def _execute(self, d: PlannedStep) -> StepDone:
        rows = [r for r in d.rows if r not in self.blocked]
        returned = set(d.rows) - set(rows)
        skipped = {r for r in rows if r in self.skip_next}
        self.skip_next -= skipped
        returned |= skipped
        rows = [r for r in rows if r not in skipped]
        self.blocked |= skipped
        failed = {r: {"code": "failed", "message": "planted"} for r in rows if r in self.fail_next}
        self.fail_next -= failed.keys()
        rows = [r for r in rows if r not in failed]
        for r in failed:
            self.rows[r].over = True
        self.blocked |= failed.keys()
        at = {r: i for i, r in enumerate(d.rows)}
        need = {r: (d.spans[at[r]][1] - d.spans[at[r]][0]) or 1 for r in rows}
        if self.used_of(d.node.partition("/")[0]) + sum(need.values()) > self.pages:
            self.blocked |= set(rows)
            return StepDone(
                d.step, failed=failed, returned=frozenset(returned),
                refusal=Refusal({"code": "cannot_fit", "message": "no page"}),
            )  # fmt: skip
        ends: dict[int, RowEnd] = {}
        for r in rows:
            self._advance(r, d, at[r], need[r], ends)
        return StepDone(d.step, ends, failed, {}, frozenset(returned))

    def _advance(self, r: int, d: PlannedStep, i: int, need: int, ends: dict[int, RowEnd]) -> None:
        row = self.rows[r]
        assert row.ingested
        assert r not in self.removed
        assert d.positions[i] == row.consumed, f"row {r}: {d.positions[i]} is not {row.consumed}"
        assert d.outputs[i] == self._base(r) + row.outputs
        if d.spans[i] != (0, 0):
            assert d.spans[i][0] == row.consumed, "prompt chunks must follow one another"
        row.consumed += need
        if not d.samples[i]:
            return
        row.outputs += 1
        assert row.outputs <= row.row.max_steps, "a step beyond max_steps"
        if row.over:
            return
        row.sent += 1
        final = row.row.path[-1]
        if row.sent in (row.stops_at, row.row.max_steps) or (final[1] and final[0] == d.batch):
            row.over = True
            reason = Reason.STOP if row.sent == row.stops_at else Reason.LENGTH
            ends[r] = RowEnd(reason, self._base(r) + row.sent, True)

    def _removed(self, row: int) -> None:
        self.removed.add(row)

    def _base(self, row: int) -> int:
        r = self.rows[row].row
        return (r.base[0] if r.base else 0) + len(r.handed)


def make_row(
    number: int,
    path: Sequence[Sequence[int]],
    max_steps: int = 4,
    *,
    base: int = 0,
    flags: int = 1,
    owner: int = OWNER,
    tokens: Sequence[int] | None = None,
) -> Row:
    """`tokens` default to 1, 2, … as many as the path consumes."""
    n = sum(t for _, t in path)
    data = columns.to_bytes(columns.u32(range(1, n + 1) if tokens is None else tokens))
    return Row(
        row=number, owner=owner, stream=number, attempt=1, ordinal=0,
        path=[list(p) for p in path], base=[base], handed=[], inputs={"tokens": data}, params={},
        max_steps=max_steps, flags=flags,
    )  # fmt: skip
