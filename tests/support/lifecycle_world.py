"""The conductor's core, real owners and workers with a real MicroScheduler, on a simulated network.

It adds to `Simulation` what the wire promises about attempts and rows (docs/wire.md, "Invariants"),
checked as messages pass, and a network that repeats frames.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from conductor.core.commands import Command, Send
from conductor.core.placement import MAX_PREEMPTIONS
from protocol.client.owned_stream import OwnedStream
from protocol.messages import Frames, History, Reason, Rebase, Refuse, Row, Run
from tests.support.conductor_harness import SimOwner, Simulation
from tests.support.conductor_sim_worker import Crash
from tests.support.scheduler_worker import SchedulerWorker
from worker.micro_scheduler.scheduler import MicroScheduler

Attempt = tuple[int, int, int]  # owner life, stream, attempt


@dataclass
class World(Simulation):
    """`make_scheduler`: for tests that plant a bug in it."""

    depth: int = 2
    make_scheduler: Any = MicroScheduler
    placed: set[Attempt] = field(default_factory=set)
    told: set[Attempt] = field(default_factory=set)  # histories that reached the conductor
    asked: dict[tuple[int, int], int] = field(default_factory=dict)  # attempts of Rebase
    preempted: Counter[tuple[int, int]] = field(default_factory=Counter)
    checked: dict[tuple[int, int], int] = field(default_factory=dict)  # tokens found right
    rights: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def start_worker(self, name: str) -> Any:
        worker = SchedulerWorker(name, self.life(), self.spec, self.depth, self.make_scheduler)
        self.workers[worker.life] = worker  # type: ignore[assignment]
        self._open_session(worker.life, worker.hello([]))
        return worker

    # ---- what passes

    def _perform(self, command: Command) -> None:
        if isinstance(command, Send):
            if isinstance(command.message, Run):
                for row in command.message.rows:
                    if isinstance(row, Row):
                        self._placed(row)
            elif isinstance(command.message, Rebase):
                m = command.message
                for stream, attempt in zip(m.stream, m.attempt, strict=True):
                    key = command.life, stream
                    assert attempt >= self.asked.get(key, 2), "attempts rise"
                    self.asked[key] = attempt
        super()._perform(command)
        match command:
            case Send(life, Refuse("fenced")) if life in self.owners:
                self._fenced(life)
            case _:
                pass

    def _placed(self, row: Row) -> None:
        key = row.owner, row.stream, row.attempt
        assert key not in self.placed, "two rows of one attempt"
        self.placed.add(key)
        assert row.attempt == 1 or key in self.told, "placed before its owner told its history"
        assert row.attempt >= self.asked.get(key[:2], 1), "an attempt that was given up is placed"

    def deliver(self, source: int, target: int) -> None:
        message = self.links[(source, target)][0]
        if target == 0 and isinstance(message, History) and source in self.sessions:
            self.told.add((source, message.stream, message.attempt))
        late = self._late(message, target) if isinstance(message, Frames) else {}
        super().deliver(source, target)
        for s, length in late.items():
            assert len(s.tokens) == length, "tokens of another attempt were taken"

    def _fenced(self, life: int) -> None:
        """The owner was taken for dead: it ends its streams, and only a new life may come back."""
        owner = self.owners[life]
        owner.act(owner.book.close_all(Reason.OWNER_LOST))
        assert set(owner.ended) == set(owner.streams)
        self._check_owner(owner)
        self.kill_owner(life)
        self.start_owner(owner.name + "'")

    def _late(self, m: Frames, target: int) -> dict[OwnedStream, int]:
        """Open streams of the owner whose frames in `m` are of another attempt (rule 7)."""
        known = self.owners[target].streams if target in self.owners else {}
        rows = [(known[s], a) for s, a in zip(m.stream, m.attempt, strict=True) if s in known]
        return {s: len(s.tokens) for s, attempt in rows if attempt != s.attempt}

    def repeat(self, source: int, target: int) -> None:
        """The network delivers a frame of a stream link twice."""
        message = self.links[(source, target)][0]
        if isinstance(message, Frames) and target in self.owners:
            self.owners[target].take(message, self.now)
            self.flush()

    def engine(self, worker: SchedulerWorker) -> bool:
        try:
            moved = worker.engine()
        except Crash:
            self.crashes += 1
            self.kill(worker.life, outside=False)
            return True
        self.flush()
        return moved

    def main(self, worker: SchedulerWorker) -> bool:
        moved = worker.main()
        for row in worker.preempted:
            self.preempted[row.owner, row.stream] += 1
        worker.preempted.clear()
        self.flush()
        return moved

    # ---- judging

    def check(self) -> None:
        """After every move: what was delivered is right so far; preemptions are bounded."""
        for owner in self.owners.values():
            self._check_owner(owner)
        for key, times in self.preempted.items():
            assert times <= MAX_PREEMPTIONS, f"stream {key} was preempted {times} times"
        requests = self.machine.snapshot(self.now)["requests"]
        assert requests["submitted"] == sum(requests["closed"].values()) + requests["open"]

    def _check_owner(self, owner: SimOwner) -> None:
        for stream, s in owner.streams.items():
            key = owner.life, stream
            if self.checked.get(key, 0) != len(s.tokens):
                right = self.rights.get(key)
                if right is None:
                    right = self.rights[key] = self.right(owner, stream)
                assert list(s.tokens) == right[: len(s.tokens)], f"stream {key} went wrong"
                self.checked[key] = len(s.tokens)

    def settle(self, limit: int = 20_000) -> None:
        """Let everything go on, fairly, until nothing is open."""
        for turn in range(limit):
            moved = False
            for link in self.moves():
                while self.links.get(link):
                    self.deliver(*link)
                    moved = True
            for worker in list(self.workers.values()):
                w: Any = worker
                for move in (self.engine, self.engine, self.main):
                    if w.life in self.workers and move(w):
                        moved = True
            for owner in self.owners.values():
                if owner.life not in self.sessions:
                    self.reset(owner.life, notice=False)
            if not moved or turn % 8 == 0:
                self.check()
                self.pass_time(0.05)
            if not moved and self.at_rest():
                return
        raise AssertionError(f"not at rest: {self.machine.snapshot(self.now)}")

    def at_rest(self) -> bool:
        workers: Any = self.workers.values()
        return super().at_rest() and all(w.at_rest for w in workers)
