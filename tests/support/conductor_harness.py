"""A Machine among simulated workers and owners that obey the protocol, with every link a queue.

A link is FIFO; nothing orders two links, and a seed decides which moves next. Workers compute a
keyed hash of the history, so the right answer to every request is known. The owners are the real
`protocol.client.owner.Owner`. Invariants are checked after every event.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from conductor.core.commands import Command, Drained, Forget, Kill, Send
from conductor.core.events import Event, LinkDown, Received, Tick, WorkerExited
from conductor.core.machine import Machine
from protocol import PROTOCOL_VERSION, columns
from protocol.client.owned_stream import OwnedStream
from protocol.client.owner import Ended, Owner
from protocol.client.owner import Send as OwnerSend
from protocol.config import DaemonConfig
from protocol.graph import ModelSpec, spec_to_wire
from protocol.messages import (
    FLAG_CLOSES,
    FLAG_END,
    ROW_TRIAL,
    Beat,
    Bye,
    Close,
    End,
    Exit,
    Frames,
    Hello,
    Kind,
    Leave,
    Leaving,
    Message,
    Open,
    Owners,
    Reason,
    Rebase,
    Refuse,
    Report,
    Row,
    Run,
    Welcome,
)
from tests.support import conductor_driver

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


class SimOwner:
    def __init__(self, name: str, life: int) -> None:
        self.name, self.life = name, life
        self.book = Owner()
        self.streams: dict[int, OwnedStream] = {}
        self.ended: dict[int, Ended] = {}
        self.out: list[tuple[int, Message]] = []
        self.welcomed = False
        self.carried: list[Message] = []

    def hello(self) -> Hello:
        return Hello(
            "gateway", self.name, self.life, [PROTOCOL_VERSION], f"ipc://{self.name}",
            inventory=self.book.inventory(),
        )  # fmt: skip

    def act(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, OwnerSend):
                if self.welcomed:
                    self.out.append((0, event.message))
                elif event.keep:
                    self.carried.append(event.message)
            elif isinstance(event, Ended):
                assert event.stream not in self.ended, "one terminal event per stream"
                self.ended[event.stream] = event

    def take(self, m: Message, now: float) -> None:
        match m:
            case Welcome():
                self.welcomed = True
                self.out += [(0, c) for c in self.carried]
                self.carried = []
                self.act(list(self.book.submissions(now)))
            case End():
                self.act(self.book.end(m))
            case Rebase():
                self.act(self.book.rebase(m))
            case Frames():
                self.act(self.book.frames(m))
            case Refuse():
                self.welcomed = False
            case _:
                assert isinstance(m, Beat), m


@dataclass
class Simulation:
    """The machine, its peers, and the links between them, moved one message at a time."""

    config: DaemonConfig
    spec: ModelSpec
    seed: int = 0
    restart_after: float = 0.5
    now: float = 1000.0
    workers: dict[int, SimWorker] = field(default_factory=dict)
    owners: dict[int, SimOwner] = field(default_factory=dict)
    drained: int = 0
    commands: list[Command] = field(default_factory=list)
    orders: dict[tuple[int, int], dict[str, Any]] = field(default_factory=dict)
    crashes: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.machine = Machine(self.config, conductor_driver.LIFE, seed=self.seed)
        self.links: dict[tuple[int, int], deque[Message]] = {}  # (from, to); 0 is the conductor
        self.sessions: set[int] = set()
        self.greeting: set[int] = set()  # Hello is on its way: what comes down is of an old session
        self.starts: list[tuple[float, str]] = []
        self.beat_at = self.now
        self._lives = 1

    # ---- building

    def life(self) -> int:
        self._lives += 1
        return self._lives

    def start_worker(self, name: str) -> SimWorker:
        worker = SimWorker(name, self.life(), self.spec, self.config.limits.max_rows)
        self.workers[worker.life] = worker
        self._open_session(worker.life, worker.hello([]))
        return worker

    def start_owner(self, name: str) -> SimOwner:
        owner = SimOwner(name, self.life())
        self.owners[owner.life] = owner
        self._open_session(owner.life, owner.hello())
        return owner

    def submit(self, owner: SimOwner, prompt: list[int], max_tokens: int, **more: Any) -> int:
        stop, seed = more.pop("stop", -1), self.random.randrange(1 << 40)
        if more.pop("stops", False):  # somewhere on its way
            stop = self.random.choice(expected(prompt, seed, max_tokens, -1))
        params = {"max_tokens": max_tokens, "seed": seed}
        if stop >= 0:
            params["stop_token_ids"] = [stop]
        inputs = {"tokens": conductor_driver.tokens(prompt)}
        s = owner.book.open("m", inputs, params, self.now, **more)
        owner.streams[s.id] = s
        self.orders[(owner.life, s.id)] = {
            "prompt": prompt, "seed": params["seed"], "max_tokens": max_tokens, "stop": stop,
        }  # fmt: skip
        if owner.welcomed:
            owner.act([owner.book.submission(s, self.now)])
        self.flush()
        return s.id

    # ---- the world moves

    def event(self, event: Event) -> None:
        out = self.machine.handle(event, self.now)
        self.machine.check()
        self.commands += out
        for command in out:
            self._perform(command)

    def _perform(self, command: Command) -> None:
        match command:
            case Send(life, message):
                if life in self.sessions and life not in self.greeting:
                    self._link(0, life).append(message)
            case Forget(life):
                self._close_session(life)
            case Kill(life):
                self.kill(life, outside=True)
            case Drained():
                self.drained += 1
            case _:
                pass

    def _link(self, source: int, target: int) -> deque[Message]:
        return self.links.setdefault((source, target), deque())

    def _open_session(self, life: int, hello: Hello) -> None:
        """A new session: what the old one had in flight is gone."""
        self.links.pop((0, life), None)
        self.links[(life, 0)] = deque([hello])
        self.sessions.add(life)
        self.greeting.add(life)

    def _close_session(self, life: int) -> None:
        self.sessions.discard(life)
        self.links.pop((0, life), None)
        self.links.pop((life, 0), None)
        if life in self.owners:
            self.owners[life].welcomed = False

    def flush(self) -> None:
        for peer in (*self.workers.values(), *self.owners.values()):
            for target, message in peer.out:
                if target or peer.life in self.sessions:
                    self._link(peer.life, target).append(message)
            peer.out = []

    def deliver(self, source: int, target: int) -> None:
        message = self.links[(source, target)].popleft()
        if target == 0:
            if isinstance(message, Hello):
                self.greeting.discard(source)
            if source in self.sessions:
                self.event(Received(source, message))
            if isinstance(message, Bye) and source in self.workers:
                self.kill(source, outside=True)
        elif target in self.workers:
            self.workers[target].take(message)
        elif target in self.owners:
            self.owners[target].take(message, self.now)
            if isinstance(message, Frames) and source in self.workers:
                self.workers[source].acknowledged(message)
        self.flush()

    def moves(self) -> list[tuple[int, int]]:
        return [k for k, q in self.links.items() if q]

    def step(self, worker: SimWorker) -> bool:
        try:
            moved = worker.step()
        except Crash:
            self.crashes += 1
            self.kill(worker.life, outside=False)
            return True
        self.flush()
        return moved

    def kill(self, life: int, outside: bool) -> None:
        """SIGKILL: what it had sent may still arrive on stream links, and on control before."""
        worker = self.workers.pop(life, None)
        if worker is None:
            return
        for (source, target), queue in self.links.items():
            if source == life and target:
                keep = self.random.randint(0, len(queue))
                while len(queue) > keep:
                    queue.pop()
        self.links.pop((0, life), None)
        self.starts.append((self.now + self.restart_after, worker.name))
        self.event(WorkerExited(life, outside, "killed"))

    def kill_owner(self, life: int) -> None:
        self.owners.pop(life)
        for key in [k for k in self.links if life in k]:
            del self.links[key]
        self.sessions.discard(life)

    def reset(self, life: int, notice: bool) -> None:
        """The session ends; the peer says Hello again with its inventory and what it kept."""
        lost = list(self.links.get((life, 0), ()))
        if notice and life in self.sessions:
            self._close_session(life)
            self.event(LinkDown(life, "reset"))
        if life in self.workers:
            ends = [
                [m.row[i], m.kind[i], m.value[i]]
                for m in lost
                if isinstance(m, Report)
                for i in range(len(m.row))
                if m.kind[i] >= Kind.FINISHED
            ]
            self._open_session(life, self.workers[life].hello(ends))
            return
        owner = self.owners[life]
        owner.carried += [m for m in lost if type(m).__name__ == "Closed"]
        owner.welcomed = False
        self._open_session(life, owner.hello())

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for due, name in list(self.starts):
            if due <= self.now:
                self.starts.remove((due, name))
                self.start_worker(name)
        if self.now >= self.beat_at:
            self.beat_at = self.now + 0.2
            for worker in self.workers.values():
                worker.progress()
                worker.out.append((0, Beat(worker.steps, 0, {})))
                if worker.exiting:
                    worker.out.append((0, Bye("drained")))
            for owner in self.owners.values():
                owner.act(owner.book.tick(self.now))
                if owner.life in self.sessions and owner.welcomed:
                    owner.out.append((0, Beat()))
            self.flush()
        due = self.machine.next_due()
        if due is not None and due <= self.now:
            self.event(Tick())

    def drain_worker(self, worker: SimWorker, grace_ms: int) -> None:
        worker.out.append((0, Leaving(grace_ms)))
        self.flush()

    def settle(self, limit: int = 200_000) -> None:
        """Let everything go on, fairly, until nothing is open."""
        for i in range(limit):
            moves = self.moves()
            if moves:
                self.deliver(*self.random.choice(moves))
            for worker in self.workers.values():
                worker.resume_all()
            self.flush()
            stepping = [w for w in list(self.workers.values()) if self.step(w)]
            for owner in self.owners.values():
                if owner.life not in self.sessions:
                    self.reset(owner.life, notice=False)
            if not stepping or i % 8 == 0:
                self.pass_time(0.02)
            if not moves and not stepping and self.at_rest():
                return
        raise AssertionError(f"not at rest: {self.machine.snapshot(self.now)}")

    def at_rest(self) -> bool:
        machine = self.machine.snapshot(self.now)
        return (
            machine["requests"]["open"] == 0
            and not self.starts
            and not any(w.rows for w in self.workers.values())
            and all(o.book.statistics()["open"] == 0 for o in self.owners.values())
            and all(w["rows"] == 0 for w in machine["workers"])
        )

    # ---- judging

    def answer(self, owner: SimOwner, stream: int) -> tuple[Reason, list[int]]:
        return owner.ended[stream].reason, list(owner.streams[stream].tokens)

    def right(self, owner: SimOwner, stream: int) -> list[int]:
        order = self.orders[(owner.life, stream)]
        return expected(**order)

    def check_answers(self) -> None:
        """Every stream ended once; what it delivered is the beginning of the right answer, and all
        of it if it ended well."""
        for owner in self.owners.values():
            assert set(owner.ended) == set(owner.streams)
            for stream in owner.streams:
                reason, got = self.answer(owner, stream)
                right = self.right(owner, stream)
                assert got == right[: len(got)], f"stream {stream} of {owner.name} went wrong"
                if reason.success:
                    assert got == right
                assert reason not in (Reason.DIVERGED, Reason.NONE)
        requests = self.machine.snapshot(self.now)["requests"]
        assert requests["submitted"] == sum(requests["closed"].values()) + requests["open"]
