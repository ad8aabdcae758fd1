"""Order, time and bugs of the loop round the core, with a core that does as the test says."""

import asyncio
from collections.abc import Callable
from typing import Any

from conductor.core.commands import Command, Note, Send
from conductor.core.events import Event, LinkDown, Received, Tick
from conductor.shell.console import Console
from conductor.shell.core_loop import MAX_BUGS, CoreLoop
from conductor.shell.log import LogWriter
from protocol.config import LogConfig
from protocol.errors import IllegalTransition, InvariantViolation
from protocol.messages import Beat


class Script:
    """A core: `on` decides the commands; `due` is what `next_due` answers."""

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.on: Callable[[Event], list[Command]] = lambda event: []
        self.due: float | None = None
        self.broken = False
        self.open = 0
        self.checks = 0

    def handle(self, event: Event, now: float) -> list[Command]:
        self.seen.append(event)
        return self.on(event)

    def next_due(self) -> float | None:
        return self.due

    def snapshot(self, now: float) -> dict[str, Any]:
        return {"requests": {"open": self.open}}

    def check(self) -> None:
        self.checks += 1
        if self.broken:
            raise InvariantViolation("2 pages counted, 3 held")


class Rig:
    def __init__(self, beat_s: float = 60.0) -> None:
        self.core = Script()
        self.done: list[Command] = []
        self.on_perform: Callable[[Command], None] = self.done.append
        self.resets: list[int] = []
        self.causes: list[str] = []
        self.turns = 0
        self.ticks = asyncio.Event()
        self.now = 0.0
        self.writer = LogWriter(-1, False)  # no such descriptor: nothing is shown
        self.loop = CoreLoop(
            self.core,
            beat_s,
            Console(LogConfig(), self.writer).log,
            perform=self._do,
            reset=self.resets.append,
            turned=self.turned,
            ticked=self.ticks.set,
            broken=self.causes.append,
            monotonic=lambda: self.now,
        )

    def _do(self, command: Command) -> None:
        self.on_perform(command)

    def turned(self) -> None:
        self.turns += 1

    def close(self) -> None:
        self.loop.stop()
        self.writer.close()


async def test_an_event_fed_while_performing_waits_its_turn() -> None:
    rig = Rig()
    first, second = LinkDown(1, "a"), LinkDown(2, "b")
    rig.core.on = lambda e: [Note("info", "x"), Note("info", "y")] if e == first else []

    def perform(command: Command) -> None:
        rig.done.append(command)
        if command == Note("info", "x"):
            rig.loop.feed(second)
            assert rig.core.seen == [first], "handled inside another event's commands"

    rig.on_perform = perform
    rig.loop.feed(first)
    assert rig.core.seen == [first, second]
    assert rig.done == [Note("info", "x"), Note("info", "y")]
    assert rig.turns == 1
    assert sum(rig.loop.turns.statistics()["counts"]) == 1
    rig.close()


async def test_it_ticks_at_the_beat_and_when_the_core_asks() -> None:
    rig = Rig(beat_s=0.01)
    rig.loop.feed(LinkDown(1, "a"))
    async with asyncio.timeout(10):
        await rig.ticks.wait()
    assert rig.core.seen[-1] == Tick()
    rig.close()

    slow = Rig(beat_s=3600.0)
    slow.loop.feed(LinkDown(1, "a"))
    slow.core.due = 0.005
    slow.loop.feed(LinkDown(2, "b"))
    async with asyncio.timeout(10):
        await slow.ticks.wait()
    slow.close()


async def test_a_core_that_always_wants_now_lets_others_run() -> None:
    rig = Rig()
    rig.core.due = -1.0
    rig.loop.feed(LinkDown(1, "a"))
    async with asyncio.timeout(10):
        await rig.ticks.wait()
        rig.ticks.clear()
        await rig.ticks.wait()
    rig.close()


async def test_nothing_is_handled_after_stop() -> None:
    rig = Rig(beat_s=0.001)
    rig.loop.feed(LinkDown(1, "a"))
    rig.loop.stop()
    rig.loop.feed(LinkDown(2, "b"))
    await asyncio.sleep(0.01)
    assert rig.core.seen == [LinkDown(1, "a")]
    rig.close()


def boom(event: Event) -> list[Command]:
    raise IllegalTransition("request 0x5", "QUEUED", "MOVED", ["queued by Submit"])


async def test_one_bug_costs_its_event_and_renews_its_peers_session() -> None:
    rig = Rig()
    rig.core.on = boom
    rig.loop.feed(Received(9, Beat()))
    assert rig.resets == [9]
    assert (rig.loop.bugs, rig.causes) == (1, [])
    rig.core.on = lambda e: [Note("info", "still here")]
    rig.loop.feed(LinkDown(1, "a"))
    assert rig.done == [Note("info", "still here")]
    rig.close()


async def test_a_lost_message_renews_its_receivers_session() -> None:
    rig = Rig()
    rig.core.on = lambda e: [Send(7, Beat())]

    def perform(command: Command) -> None:
        raise OverflowError("no u64")

    rig.on_perform = perform
    rig.loop.feed(Received(9, Beat()))
    assert rig.resets == [9, 7]
    rig.loop.feed(LinkDown(1, "a"))
    assert rig.resets == [9, 7, 7]
    rig.close()


async def test_a_command_that_fails_is_lost_alone() -> None:
    rig = Rig()
    rig.core.on = lambda e: [Note("info", "bad"), Note("info", "good")]

    def perform(command: Command) -> None:
        if command == Note("info", "bad"):
            raise OverflowError("no u64")
        rig.done.append(command)

    rig.on_perform = perform
    rig.loop.feed(LinkDown(1, "a"))
    assert rig.done == [Note("info", "good")]
    assert rig.loop.bugs == 1
    rig.close()


async def test_bugs_of_the_shell_count_too() -> None:
    rig = Rig()
    for _ in range(MAX_BUGS + 1):
        rig.loop.failed("a reader raised", KeyError("x"))
    assert len(rig.causes) == 1
    rig.close()


async def test_bugs_that_repeat_end_the_daemon_with_their_story() -> None:
    rig = Rig()
    rig.core.on = boom
    for _ in range(MAX_BUGS):
        rig.loop.feed(LinkDown(1, "a"))
    assert rig.causes == []
    rig.loop.feed(LinkDown(1, "a"))
    (cause,) = rig.causes
    assert "no transition from QUEUED on MOVED" in cause
    assert "queued by Submit" in cause
    rig.close()


async def test_rare_bugs_never_end_it() -> None:
    rig = Rig()
    rig.core.on = boom
    for i in range(20):
        rig.now = i * 30.0
        rig.loop.feed(LinkDown(1, "a"))
    assert (rig.loop.bugs, rig.causes) == (20, [])
    rig.close()


async def test_invariants_are_checked_when_nothing_is_open() -> None:
    rig = Rig(beat_s=0.001)
    rig.core.open = 1
    rig.core.broken = True
    rig.now = 10.0
    rig.loop.feed(Tick())
    async with asyncio.timeout(10):
        await rig.ticks.wait()
    assert rig.core.checks == 0
    rig.core.open = 0
    rig.now = 20.0
    rig.ticks.clear()
    async with asyncio.timeout(10):
        await rig.ticks.wait()
    assert (rig.core.checks, rig.loop.bugs) == (1, 1)
    rig.close()
