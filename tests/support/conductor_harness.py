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
from protocol import PROTOCOL_VERSION
from protocol.client.owned_stream import OwnedStream
from protocol.client.owner import Ended, Owner
from protocol.client.owner import Send as OwnerSend
from protocol.config import DaemonConfig
from protocol.graph import ModelSpec
from protocol.messages import (
    Beat,
    Bye,
    End,
    Frames,
    Hello,
    Kind,
    Leaving,
    Message,
    Reason,
    Rebase,
    Refuse,
    Report,
    Welcome,
)
from tests.support import conductor_driver
from tests.support.conductor_sim_worker import Crash, SimWorker, expected


class SimOwner:
    def __init__(self, name: str, life: int) -> None:
        self.name, self.life = name, life
        self.book = Owner()
        self.streams: dict[int, OwnedStream] = {}
        self.ended: dict[int, Ended] = {}
        self.out: list[tuple[int, Message]] = []
        self.welcomed = False
        self.fenced = False
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
                self.fenced = m.code == "fenced"
                if self.fenced:
                    self.act(self.book.close_all(Reason.OWNER_LOST))
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
            owner = self.owners[target]
            owner.take(message, self.now)
            if owner.fenced:  # it was taken for dead: as a process, it starts anew
                self.kill_owner(owner.life)
                self.start_owner(owner.name + "'")
            elif isinstance(message, Frames) and source in self.workers:
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
