"""A simulated worker: it obeys rules 1 to 6 and 11 and asserts what the conductor owes a worker.

It computes a keyed hash of the history, so the right answer to every request is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from protocol import PROTOCOL_VERSION, columns
from protocol.graph import ModelSpec, spec_to_wire
from protocol.messages import (
    FLAG_CLOSES,
    FLAG_END,
    ROW_TRIAL,
    Beat,
    Close,
    Exit,
    Frames,
    Hello,
    Kind,
    Leave,
    Message,
    Open,
    Owners,
    Reason,
    Refuse,
    Report,
    Row,
    Run,
    Welcome,
)

POISON = 900  # a worker that steps a row with this token in its input dies; never an output
MASK = (1 << 64) - 1


def advance(state: int, token: int) -> int:
    return ((state ^ token) * 6364136223846793005 + 1442695040888963407) & MASK


def expected(prompt: list[int], seed: int, max_tokens: int, stop: int) -> list[int]:
    """What the reference model answers: up to and with its stop token."""
    state, out = seed, list[int]()
    for token in prompt:
        state = advance(state, token)
    while len(out) < max_tokens:
        out.append((state >> 33) % POISON)
        state = advance(state, out[-1])
        if out[-1] == stop:
            break
    return out


@dataclass
class SimRow:
    """`state`: hash of the tokens consumed; `produced`: outputs of this stay."""

    wire: Row
    inputs: list[int]
    state: int
    stop: int
    stage: int = 0
    consumed: int = 0
    produced: int = 0
    told: int = 0
    unread: int = 0  # frames that its owner has not taken
    held: bool = False

    @property
    def position(self) -> int:
        return self.wire.base[0] + self.produced

    @property
    def on_trial(self) -> bool:
        return bool(self.wire.flags & ROW_TRIAL) and self.produced < 4


class Crash(Exception):
    pass


class SimWorker:
    """Obeys rules 1 to 6 and 11; asserts what the conductor owes a worker."""

    def __init__(self, name: str, life: int, spec: ModelSpec, max_rows: int) -> None:
        self.name, self.life, self.spec, self.max_rows = name, life, spec, max_rows
        self.rows: dict[int, SimRow] = {}
        self.ended: dict[int, SimRow] = {}  # with frames that are not acknowledged
        self.standing: dict[int, list[int]] = {}
        self.one_shot: dict[int, list[int]] = {}
        self.owners: set[int] = set()
        self.out: list[tuple[int, Message]] = []  # (owner life or 0 for the conductor, message)
        self.steps = 0
        self.last_was_standing = True
        self.exiting = False
        self.has_held = False

    def hello(self, ends: list[list[Any]]) -> Hello:
        inventory = {
            "rows": [[i, r.stage, r.position] for i, r in self.rows.items()],
            "ends": ends,
            "batches": [*self.standing, *self.one_shot],
        }
        specs = [spec_to_wire(self.spec)]
        return Hello(
            "worker", self.name, self.life, [PROTOCOL_VERSION], specs=specs, inventory=inventory
        )

    def take(self, m: Message) -> None:
        match m:
            case Owners(life, _, up):
                (self.owners.add if up else self.owners.discard)(life)
            case Open():
                assert m.batch not in self.standing, "a standing batch is opened once"
                assert m.max_rows <= self.max_rows
                self.standing[m.batch] = []
            case Close(batch):
                assert not self._seated(batch), "Close needs an empty batch"
                del self.standing[batch]
            case Run():
                self._run(m)
            case Leave():
                for row_id in m.row:
                    if row_id in self.rows:
                        self._end(row_id, Kind.LEFT)
            case Exit():
                assert not self.rows, "a worker is let go with rows"
                self.exiting = True
            case _:
                assert isinstance(m, Welcome | Beat | Refuse), m

    def _seated(self, batch: int) -> list[int]:
        return [i for i, r in self.rows.items() if any(b == batch for b, _ in r.wire.path)]

    def _run(self, m: Run) -> None:
        assert m.batch not in self.one_shot, "a one-shot batch comes whole"
        listed: list[int] = []
        for r in m.rows:
            if isinstance(r, Row):
                self._arrive(r, m)
            row_id = r.row if isinstance(r, Row) else r
            if row_id in self.rows:
                path = self.rows[row_id].wire.path
                assert any(b == m.batch for b, _ in path), "a batch that its path doesn't name"
                listed.append(row_id)
        if m.batch in self.standing:
            return
        if listed:
            self.one_shot[m.batch] = listed
        assert self.has_held or len(self.one_shot) <= 2, "at most two one-shot batches are ahead"

    def _arrive(self, r: Row, m: Run) -> None:
        assert r.row not in self.rows, "a row comes once"
        assert r.owner in self.owners, "its owner is announced first"
        assert "seed" in r.params
        assert r.path[-1][0] in self.standing, "its standing batch is opened first"
        others = [x for i, x in self.rows.items() if i != r.row]
        trial = bool(r.flags & ROW_TRIAL)
        assert not any(x.on_trial for x in others) or trial, "a row beside a trial"
        if trial:
            assert all(x.wire.flags & ROW_TRIAL for x in others), "a trial beside other rows"
        inputs = list(columns.from_bytes("I", r.inputs["tokens"], "tokens"))
        assert sum(n for _, n in r.path) == len(inputs)
        stop = r.params.get("stop_token_ids", [-1])[0]
        row = SimRow(r, inputs, r.params["seed"], stop)
        self.rows[r.row] = row
        over = r.max_steps == 0 or (r.base[0] > 0 and inputs[-1] == stop)
        if over:  # rule 11
            why = Reason.STOP if r.base[0] and inputs[-1] == stop else Reason.LENGTH
            self._frame({r.owner: [(row, [], why)]})
            self._end(r.row, Kind.FINISHED, why)

    def step(self) -> bool:
        """One engine step; False: nothing to do. Raises Crash where a poisoned row is in it."""
        shots = [b for b in self.one_shot if self._in_stage(b)]
        loops = [b for b in self.standing if self._in_stage(b)]
        if not shots and not loops:
            return False
        pick_loop = bool(loops) and (not shots or not self.last_was_standing)
        self.last_was_standing = pick_loop
        batch = loops[self.steps % len(loops)] if pick_loop else shots[0]
        rows = [self.rows[i] for i in self._in_stage(batch)]
        if any(POISON in r.inputs for r in rows):
            raise Crash
        self.steps += 1
        frames: dict[int, list[tuple[SimRow, list[int], Reason]]] = {}
        ends: list[tuple[int, Reason]] = []
        for row in rows:
            if not pick_loop:
                self._unlist(batch, row.wire.row)
            self._compute(row, pick_loop, frames, ends)
        self._frame(frames)
        for row_id, reason in ends:
            self._end(row_id, Kind.FINISHED, reason)
        return True

    def _stage_batch(self, row_id: int) -> int:
        row = self.rows[row_id]
        return row.wire.path[row.stage][0]

    def _in_stage(self, batch: int) -> list[int]:
        """Rows that a step of this batch would run."""
        listed = self.one_shot.get(batch, self.rows)
        return [i for i in listed if self._stage_batch(i) == batch and not self.rows[i].held]

    def _unlist(self, batch: int, row_id: int) -> None:
        self.one_shot[batch].remove(row_id)
        if not self.one_shot[batch]:
            del self.one_shot[batch]

    def hold(self, row_id: int) -> None:
        self.has_held = self.rows[row_id].held = True
        self._say(self.rows[row_id], Kind.HELD, 0)

    def resume_all(self) -> None:
        for row in self.rows.values():
            if row.held:
                row.held = False
                self._say(row, Kind.RESUMED, 0)

    def give_up(self, row_id: int, kind: Kind) -> None:
        """The row ends by refusal, failure or preemption, nothing of it being in flight."""
        self._end(row_id, kind)

    def _compute(
        self, row: SimRow, standing: bool, frames: dict[int, Any], ends: list[tuple[int, Reason]]
    ) -> None:
        if not standing:
            n = row.wire.path[row.stage][1]
            for token in row.inputs[row.consumed : row.consumed + n]:
                row.state = advance(row.state, token)
            row.consumed += n
            row.stage += 1
            if row.consumed < len(row.inputs):
                self._say(row, Kind.MOVED, row.stage)
                return
        token = (row.state >> 33) % POISON
        row.state = advance(row.state, token)
        row.produced += 1
        reason = Reason.NONE
        if token == row.stop:
            reason = Reason.STOP
        elif row.produced == row.wire.max_steps:
            reason = Reason.LENGTH
        frames.setdefault(row.wire.owner, []).append((row, [token], reason))
        if reason:
            ends.append((row.wire.row, reason))
        elif not standing:
            self._say(row, Kind.MOVED, row.stage)
        if row.on_trial != (bool(row.wire.flags & ROW_TRIAL) and row.produced <= 4):
            self._say(row, Kind.PROGRESS, row.position)

    def _say(
        self, row: SimRow, kind: Kind, value: int, extra: dict[str, Any] | None = None
    ) -> None:
        report = Report(
            columns.u64([row.wire.row]), columns.u8([kind]), columns.u32([value]),
            columns.u32([0]), {0: extra} if extra else {},
        )  # fmt: skip
        self.out.append((0, report))

    def progress(self) -> None:
        moved = [r for r in self.rows.values() if r.produced != r.told]
        for row in moved:
            row.told = row.produced
        if moved:
            n = len(moved)
            self.out.append(
                (
                    0,
                    Report(
                        columns.u64(r.wire.row for r in moved),
                        columns.u8([Kind.PROGRESS] * n),
                        columns.u32(r.position for r in moved),
                        columns.u32([0] * n),
                    ),
                )
            )

    def _frame(self, frames: dict[int, list[tuple[SimRow, list[int], Reason]]]) -> None:
        for owner, parts in frames.items():
            for row, _, _ in parts:
                row.unread += 1
            message = Frames(
                stream=columns.u64(r.wire.stream for r, _, _ in parts),
                attempt=columns.u16(r.wire.attempt for r, _, _ in parts),
                channel=columns.u8([0] * len(parts)),
                first=columns.u32(r.position - len(t) for r, t, _ in parts),
                count=columns.u32(len(t) for _, t, _ in parts),
                flags=columns.u8(FLAG_END | FLAG_CLOSES if w else 0 for _, _, w in parts),
                reason=columns.u8(w for _, _, w in parts),
                tokens=columns.u32(x for _, t, _ in parts for x in t),
                extras={i: {"row": r.wire.row} for i, (r, _, _) in enumerate(parts)},
            )
            self.out.append((owner, message))

    def _end(self, row_id: int, kind: Kind, reason: Reason | None = None) -> None:
        row = self.rows.pop(row_id)
        extra = {"reason": int(reason), "closed": True} if reason is not None else None
        self._say(row, kind, row.position, extra)
        if row.unread:
            self.ended[row_id] = row
        for batch, rows in list(self.one_shot.items()):
            if row_id in rows:
                self._unlist(batch, row_id)

    def acknowledged(self, m: Frames) -> None:
        for extra in m.extras.values():
            row_id = extra["row"]
            row = self.rows.get(row_id) or self.ended.get(row_id)
            if row is None:
                continue
            row.unread -= 1
            if not row.unread and self.ended.pop(row_id, None) is not None:
                self._say(row, Kind.SETTLED, 0)
