"""Request, row, batch, worker and stream lifecycles, through the whole core (docs/wire.md).

Everything that decides is real: the conductor's Machine, the owners' book of streams, the workers'
MicroScheduler. Hypothesis is the network, the engine's pace, and whatever goes wrong.
"""

import random
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from conductor.core import requests
from protocol import columns
from protocol.client.owner import Owner
from protocol.errors import PodiumError
from protocol.messages import Frames, History, Leave, Rebase
from tests.support.budget import budget, hunt
from tests.support.conductor_driver import config, spec
from tests.support.conductor_sim_worker import POISON
from tests.support.lifecycle_world import World
from tests.support.scheduler_worker import SchedulerWorker
from worker.micro_scheduler.decisions import Say
from worker.micro_scheduler.scheduler import MicroScheduler

pytestmark = pytest.mark.timeout(900)  # a failure is made short first

few = st.integers(0, 7)  # which one, modulo how many there are
DISTURBANCES = (
    "kill", "kill", "kill", "repeat", "submit_poison", "cancel", "submit_again", "cut",
    "lose_an_owner", "drain", "fail_a_row", "skip_a_row", "stall",
)  # fmt: skip


class Keeps(random.Random):
    """How many frames of a killed worker still arrive: so many."""

    def __init__(self, kept: int) -> None:
        super().__init__(0)
        self.kept = kept

    def randint(self, a: int, b: int) -> int:
        return min(self.kept, b)


class Lifecycles(RuleBasedStateMachine):
    """`planted` goes to `World`; `wrongs`: what may go wrong."""

    planted: ClassVar[dict[str, Any]] = {}
    wrongs: ClassVar[tuple[str, ...]] = DISTURBANCES

    @initialize(
        workers=st.integers(1, 2), owners=st.integers(1, 2), pages=st.sampled_from([6, 6, 12, 48]),
        overcommit=st.sampled_from([1.0, 2.0, 4.0]), depth=st.integers(1, 3),
    )  # fmt: skip
    def start(self, workers: int, owners: int, pages: int, overcommit: float, depth: int) -> None:
        cfg = config(prefill_tokens=16, max_rows=4, overcommit=overcommit)
        self.world = World(cfg, spec(pages=pages), depth=depth, **self.planted)
        self.world.random = random.Random(0)
        self.lost = self.poisons = 0
        for i in range(workers):
            self.world.start_worker(f"w{i}")
        for i in range(owners):
            self.world.start_owner(f"gw{i}")
        while moves := self.world.moves():
            self.world.deliver(*moves[0])

    # ---- what people want

    @rule(
        who=few, several=st.integers(1, 5), length=st.sampled_from([1, 3, 14, 40]),
        n=st.sampled_from([1, 2, 9, 25, 40]), stops=st.booleans(),
        priority=st.sampled_from([0, 0, 0, 1]), deadline=st.sampled_from([0, 0, 0, 0, 300]),
        replay=st.sampled_from(["history", "history", "history", "restart", "never"]),
    )  # fmt: skip
    def submit(
        self, who: int, several: int, length: int, n: int, deadline: int, **more: Any
    ) -> None:
        owner = self.pick(self.world.owners, who)
        for _ in range(several):
            prompt = [(37 * len(owner.streams) + 11 * k) % POISON for k in range(length)]
            self.world.submit(owner, prompt, n, deadline_ms=deadline, **more)

    # ---- the network and the engines

    @rule(moves=st.lists(st.integers(0, 11), min_size=1, max_size=40))
    def go_on(self, moves: list[int]) -> None:
        for move in moves:
            can = self.possible()
            if not can:
                self.world.pass_time(0.05)
                continue
            what, where = can[move % len(can)]
            what(*where)

    @rule(turns=st.integers(1, 60), slow=st.sampled_from(["", "", "streams", "conductor"]))
    def go_on_evenly(self, turns: int, slow: str) -> None:
        """Everything moves but what workers say to owners, or all to the conductor, if slow."""
        for _ in range(turns):
            can = [move for move in self.possible() if not self.is_slow(move, slow)]
            for what, where in can:
                if (what, where) in self.possible():
                    what(*where)
            if not can:
                self.world.pass_time(0.05)

    def is_slow(self, move: Any, slow: str) -> bool:
        what, where = move
        if not slow or what != self.world.deliver:
            return False
        source, target = where
        return target == 0 if slow == "conductor" else source != 0 != target

    def possible(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Moves, as functions and what they are called with."""
        world = self.world
        can: list[tuple[Any, tuple[Any, ...]]] = [(world.deliver, m) for m in world.moves()]
        for w in self.workers():
            can += [(world.engine, (w,))] if w.orders else []
            can += [(world.main, (w,))] if w.done else []
        return can

    @rule(seconds=st.sampled_from([0.05, 0.2, 0.7]))
    def wait(self, seconds: float) -> None:
        self.world.pass_time(seconds)

    # ---- what goes wrong

    @rule(what=st.integers(0, 12), which=few, other=few, also=st.booleans())
    def disturb(self, what: int, which: int, other: int, also: bool) -> None:
        getattr(self, self.wrongs[what % len(self.wrongs)])(which, other, also)

    def repeat(self, which: int, other: int, also: bool) -> None:
        moves = [m for m in self.world.moves() if m[1]]
        if moves:
            self.world.repeat(*moves[which % len(moves)])

    def submit_poison(self, who: int, length: int, also: bool) -> None:
        if self.poisons < 2:
            self.poisons += 1
            self.world.submit(self.pick(self.world.owners, who), [POISON] * (length + 1), 5)

    def cancel(self, who: int, which: int, also: bool) -> None:
        owner = self.pick(self.world.owners, who)
        if owner.streams:
            owner.act(owner.book.cancel(self.pick(owner.streams, which).id))
            self.world.flush()

    def submit_again(self, who: int, which: int, also: bool) -> None:
        owner = self.pick(self.world.owners, who)
        open_streams = {i: s for i, s in owner.streams.items() if i not in owner.ended}
        if owner.welcomed and open_streams:
            s = self.pick(open_streams, which)
            owner.act([owner.book.submission(s, self.world.now)])
            self.world.flush()

    def kill(self, which: int, kept: int, outside: bool) -> None:
        """A worker that has something to lose. With `kept` odd, it dies with frames of its last
        steps in its buffers and control links are fast: the conductor has heard all it said, and
        the owners hear of its death before its last frames."""
        world = self.world
        workers = [w for w in self.workers() if w.rows or any(w.unread.values())]
        if not workers or self.lost == 3:
            return
        self.lost += 1
        worker = workers[which % len(workers)]
        life, fast = worker.life, bool(kept % 2)
        for _ in range(16 * fast):
            if life in world.workers:
                world.engine(worker)
                world.main(worker)
        while fast and world.links.get((life, 0)):
            world.deliver(life, 0)
        world.random = Keeps(kept // 2)
        world.kill(life, outside)
        world.random = random.Random(kept)
        for owner in list(world.owners):
            while fast and world.links.get((0, owner)):
                world.deliver(0, owner)

    def cut(self, which: int, other: int, notice: bool) -> None:
        peers = {**self.world.workers, **self.world.owners}
        self.world.reset(self.pick(peers, which).life, notice)

    def lose_an_owner(self, which: int, other: int, also: bool) -> None:
        if len(self.world.owners) > 1:
            owner = self.pick(self.world.owners, which)
            self.world.kill_owner(owner.life)
            self.world.start_owner(owner.name + "'")

    def drain(self, which: int, other: int, at_once: bool) -> None:
        if self.world.workers:
            worker = self.pick(self.world.workers, which)
            if not worker.exiting:
                self.world.drain_worker(worker, 0 if at_once else 100)

    def fail_a_row(self, which: int, row: int, also: bool) -> None:
        self.mark("fail_next", which, row)

    def skip_a_row(self, which: int, row: int, also: bool) -> None:
        self.mark("skip_next", which, row)

    def mark(self, how: str, which: int, row: int) -> None:
        workers = [w for w in self.workers() if w.rows]
        if workers:
            w = workers[which % len(workers)]
            getattr(w, how).add(self.pick(w.rows, row).wire.row)

    def stall(self, which: int, who: int, stalled: bool) -> None:
        workers = self.workers()
        if workers:
            w = workers[which % len(workers)]
            w.stall(self.pick(self.world.owners, who).life, stalled)
            self.world.flush()

    # ---- what always holds

    @invariant()
    def all_is_well(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for w in self.workers():
            for owner in world.owners:
                w.stall(owner, False)
        world.flush()
        world.settle(4000)
        world.check_answers()
        for w in self.workers():
            assert w.pages_used == 0
            assert all(n == 1 for n in w.ends.values())

    # ---- inside

    def workers(self) -> list[SchedulerWorker]:
        return list(self.world.workers.values())  # type: ignore[arg-type]

    @staticmethod
    def pick(things: Any, which: int) -> Any:
        values = list(things.values())
        return values[which % len(values)]


def test_lifecycles() -> None:
    run_state_machine_as_test(Lifecycles, settings=budget(30, 40))


# ---- bugs planted on purpose


class AnyAttempt(Owner):
    """Takes frames of whatever attempt (rule 7)."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts: dict[int, int] = {}

    def rebase(self, m: Rebase) -> list[Any]:
        self.attempts.update(zip(m.stream, m.attempt, strict=True))
        return super().rebase(m)

    def frames(self, m: Frames) -> list[Any]:
        attempts = columns.u16(self.attempts.get(s, 1) for s in m.stream)
        return super().frames(replace(m, attempt=attempts))


class DeafToLeave(MicroScheduler):
    def handle(self, event: Any) -> Any:
        return [] if isinstance(event, Leave) else super().handle(event)


class SaysEndsTwice(MicroScheduler):
    """Ends are said twice."""

    def handle(self, event: Any) -> Any:
        return [x for d in super().handle(event) for x in ([d, d] if _ends(d) else [d])]


def _ends(d: Any) -> bool:
    return isinstance(d, Say) and d.kind.ends


def no_wait_for_history(monkeypatch: pytest.MonkeyPatch) -> None:
    real = requests.rebase

    def rebase(s: Any, request: Any, why: str, *, replay: bool) -> bool:
        placed = real(s, request, why, replay=replay)
        if placed:
            known = History(request.stream, request.attempt, columns.u32([0]), columns.u32())
            requests.history(s, request.owner, known)
        return placed

    monkeypatch.setattr(requests, "rebase", rebase)


def forgotten_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A finished row whose frames are not acknowledged is nobody's concern (rule 14)."""
    real = requests.finish

    def finish(s: Any, request: Any, *args: Any, **more: Any) -> None:
        real(s, request, *args, **more)
        requests.settled(s, request)

    monkeypatch.setattr(requests, "finish", finish)


def submits_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    real = requests.submit

    def submit(s: Any, owner: Any, message: Any) -> None:
        owner.streams.pop(message.stream, None)
        real(s, owner, message)

    monkeypatch.setattr(requests, "submit", submit)


def any_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.conductor_harness.Owner", AnyAttempt)


PLANTED: dict[str, Any] = {
    "frames of any attempt are taken": any_attempt,
    "a replay does not wait for the history": no_wait_for_history,
    "the tail of a finished row is forgotten": forgotten_tail,
    "a repeated Submit is a new request": submits_twice,
    "Leave is not heard": DeafToLeave,
    "ends are said twice": SaysEndsTwice,
}


# Where a bug needs one thing to go wrong, others only make the search longer.
LIKELY = {
    "frames of any attempt are taken": ("kill", "repeat"),
    "the tail of a finished row is forgotten": ("kill",),
    "a repeated Submit is a new request": ("submit_again", "cut"),
    "Leave is not heard": ("cancel",),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_it_finds_a_planted_bug(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant = PLANTED[bug]
    if isinstance(plant, type):
        monkeypatch.setattr(Lifecycles, "planted", {"make_scheduler": plant})
    else:
        plant(monkeypatch)
    monkeypatch.setattr(Lifecycles, "wrongs", LIKELY.get(bug, DISTURBANCES))
    with pytest.raises((AssertionError, PodiumError, KeyError)):
        run_state_machine_as_test(Lifecycles, settings=hunt(300, 40))
