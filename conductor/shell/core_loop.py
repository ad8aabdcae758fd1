"""Runs the core: one event at a time, its commands in order, its time kept.

A bug in the core is not the end of the daemon at once. The event that met it is lost; the peer that
sent it is asked for a new session, whose inventory puts both sides' accounts right; the story is
logged. A command that cannot be done is lost alone; if it was a message, its receiver is asked for
a new session too: nothing else would tell either side that it is missing. A bug that keeps coming
back would corrupt more than a restart costs: more than `MAX_BUGS` within `BUG_WINDOW_S` seconds
ends the daemon with status 70. Bugs of the shell itself (`failed`) count among them.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import structlog

from conductor.core.commands import Command, Send
from conductor.core.events import Event, Received, Tick
from conductor.observe.histogram import Histogram

MAX_BUGS = 3
BUG_WINDOW_S = 60.0
CHECK_EVERY_S = 5.0
_SHORTEST_S = 0.001  # a core that always asks for 'now' must not spin


class Core(Protocol):
    """`conductor.core.machine.Machine`, as the shell sees it."""

    def handle(self, event: Event, now: float) -> list[Command]: ...

    def next_due(self) -> float | None: ...

    def snapshot(self, now: float) -> dict[str, Any]: ...

    def check(self) -> None: ...


class CoreLoop:
    """`perform` does a command; it may `feed` again, which waits its turn.

    `reset(life)` renews a peer's session; `turned()` is called after every turn and `ticked()`
    after every tick; `broken(cause)` once, when bugs repeat.
    """

    def __init__(
        self,
        core: Core,
        beat_s: float,
        log: structlog.typing.FilteringBoundLogger,
        *,
        perform: Callable[[Command], None],
        reset: Callable[[int], None],
        turned: Callable[[], None],
        ticked: Callable[[], None],
        broken: Callable[[str], None],
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core = core
        self._beat = beat_s
        self._log = log
        self._perform = perform
        self._reset = reset
        self._turned = turned
        self._ticked = ticked
        self._broken = broken
        self._monotonic = monotonic
        self._events: deque[Event] = deque()
        self._in_turn = False
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = 0.0
        self._will_schedule = False
        self._next_tick = 0.0
        self._next_check = 0.0
        self._recent_bugs: deque[float] = deque()
        self._stopped = False
        self.bugs = 0
        self.turns = Histogram()

    def feed(self, event: Event) -> None:
        """Handle `event` now, or after those being handled."""
        self._events.append(event)
        if self._in_turn or self._stopped:
            return
        self._in_turn = True
        started = self._monotonic()
        try:
            while self._events:
                self._one(self._events.popleft())
        finally:
            self._in_turn = False
        self.turns.add((self._monotonic() - started) * 1000)
        if not self._will_schedule:  # once for all the events that one wake-up brought
            self._will_schedule = True
            asyncio.get_running_loop().call_soon(self._schedule)
        self._turned()

    def snapshot(self) -> dict[str, Any]:
        return self._core.snapshot(self._monotonic())

    def failed(self, what: str, error: Exception) -> None:
        """A callback of the shell raised."""
        self._bug(what, error)

    def stop(self) -> None:
        """No event is handled any more."""
        self._stopped = True
        self._events.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _one(self, event: Event) -> None:
        try:
            commands = self._core.handle(event, self._monotonic())
        except Exception as e:  # a bug of ours, by the core's contract
            self._bug("an event was lost", e, event)
            return
        for command in commands:
            try:
                self._perform(command)
            except Exception as e:
                self._bug(f"a {type(command).__name__} command was lost", e, event, command)

    def _schedule(self) -> None:
        """Wake at the core's next due time, and no later than one beat after the last tick."""
        self._will_schedule = False
        if self._stopped:
            return
        now = self._monotonic()
        due = self._next_tick = self._next_tick or now + self._beat
        wanted = self._core.next_due()
        if wanted is not None:
            due = min(due, wanted)
        if self._timer is not None:
            if self._timer_due <= due:
                return  # it fires first, and looks again
            self._timer.cancel()
        self._timer_due = due
        delay = max(_SHORTEST_S, due - now)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._monotonic()
        self._next_tick = now + self._beat
        self.feed(Tick())
        if now >= self._next_check:
            self._next_check = now + CHECK_EVERY_S
            self._check()
        self._ticked()

    def _check(self) -> None:
        """The core's invariants, where they cost nothing: with nothing open."""
        if self.snapshot()["requests"]["open"] == 0:
            try:
                self._core.check()
            except Exception as e:
                self._bug("an invariant does not hold", e)

    def _bug(
        self,
        what: str,
        error: Exception,
        event: Event | None = None,
        command: Command | None = None,
    ) -> None:
        self.bugs += 1
        now = self._monotonic()
        self._recent_bugs.append(now)
        while self._recent_bugs[0] < now - BUG_WINDOW_S:
            self._recent_bugs.popleft()
        self._log.error(
            f"bug in the conductor: {what}", bug=str(error), at=_shown(event), exc_info=error
        )
        if len(self._recent_bugs) > MAX_BUGS:
            self._broken(
                f"{len(self._recent_bugs)} bugs within {BUG_WINDOW_S:g} s, the last: "
                f"{type(error).__name__}: {error}"
            )
        else:
            for part in (event, command):
                if isinstance(part, Received | Send):
                    self._reset(part.life)


def _shown(event: Event | None) -> str:
    """The event in a line; prompts and histories stay out of logs."""
    if isinstance(event, Received):
        return f"{type(event.message).__name__} of {event.life:#x}"
    return repr(event)[:200] if event is not None else "-"
