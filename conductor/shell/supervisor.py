"""Keeps the children running: spawn, watch, restart within a budget, stop.

Every child has a slot; a slot's incarnations follow each other, each with its own `life`. A child's
death is learnt through its pidfd, in about 0.1 ms. What the death means is `deaths.classify`, when
to start again is `RestartPolicy`; this file only does it.
"""

import asyncio
import json
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from conductor.shell import exit_codes
from conductor.shell.child import Child, DeathPipe
from conductor.shell.deaths import Death, classify
from conductor.shell.restart_policy import GiveUp, RestartPolicy
from protocol.config import SupervisionConfig
from protocol.ids import new_life
from protocol.stats import ChildState, ChildStats

PROGRESS = "podium-progress "
Role = Literal["worker", "gateway"]
_REAP_S = 2.0


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """`argv(life, death_fd)` is the command line of the incarnation with this life."""

    name: str
    role: Role
    argv: Callable[[int, int], list[str]]


class Watcher(Protocol):
    """Who is told. Calls come from the event loop, never from inside a supervisor method."""

    def child_line(self, name: str, line: str) -> None: ...

    def child_progress(self, name: str, progress: dict[str, Any]) -> None: ...

    def child_started(self, name: str, role: Role, pid: int, restarts: int) -> None: ...

    def child_ended(self, name: str, role: Role, life: int, death: Death) -> None:
        """Comes before any restart, so the core hears of a death before of its successor."""
        ...

    def gave_up(self, cause: str, exit_code: int) -> None: ...


@dataclass(slots=True)
class _Slot:
    spec: ChildSpec
    policy: RestartPolicy
    state: ChildState = "stopped"
    child: Child | None = None
    life: int = 0
    restarts: int = 0
    last_exit: str = ""
    timer: asyncio.TimerHandle | None = None

    def cancel_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Supervisor:
    def __init__(
        self,
        specs: list[ChildSpec],
        config: SupervisionConfig,
        environment: Mapping[str, str],
        watcher: Watcher,
    ) -> None:
        self._config = config
        self._environment = environment
        self._watcher = watcher
        self._slots = [_Slot(spec, RestartPolicy(config)) for spec in specs]
        self._death_pipe = DeathPipe()
        self._stopping = False
        self._quiet = asyncio.Event()  # no child runs
        self._quiet.set()

    def start(self) -> None:
        for slot in self._slots:
            self._spawn(slot)

    def mark_ready(self, life: int) -> None:
        slot = self._slot_of(life)
        if slot is not None and slot.state == "starting":
            slot.cancel_timer()
            slot.state = "ready"

    def all_ready(self) -> bool:
        return all(s.state == "ready" for s in self._slots)

    def role_of(self, life: int) -> Role | None:
        """None: no running child of ours has this life."""
        slot = self._slot_of(life)
        return slot.spec.role if slot is not None else None

    def kill(self, life: int, why: str) -> bool:
        """False: no running child has this life."""
        slot = self._slot_of(life)
        if slot is None or slot.child is None:
            return False
        slot.child.kill(why)
        return True

    def kill_all(self, why: str) -> None:
        """No child is left to do anything, and none is started again."""
        self._end_restarts()
        for slot in self._slots:
            if slot.child is not None:
                slot.child.kill(why)

    async def stop(self, ask: Callable[[Role, int], bool], grace_s: float) -> None:
        """Ask every child to leave (`ask(role, life)`; where it returns False: SIGTERM), kill what
        is left after `grace_s`, reap all. Children that still start up are killed at once: they
        hold nothing."""
        self._end_restarts()
        for slot in self._slots:
            if slot.child is None:
                continue
            if slot.state == "starting":
                slot.child.kill("stopped while it was starting")
            elif not ask(slot.spec.role, slot.life):
                slot.child.signal(signal.SIGTERM)
        try:
            await asyncio.wait_for(self._quiet.wait(), grace_s)
        except TimeoutError:
            self.kill_all(f"still there {grace_s:g} s after it was asked to leave")
        await self.reap()

    async def reap(self) -> None:
        """Wait for children that were killed. Raises `TimeoutError` if the kernel keeps one."""
        await asyncio.wait_for(self._quiet.wait(), _REAP_S)

    def close(self) -> None:
        self._death_pipe.close()

    def statistics(self) -> list[ChildStats]:
        return [
            {
                "name": s.spec.name,
                "role": s.spec.role,
                "pid": s.child.pid if s.child is not None else 0,
                "life": s.life,
                "state": s.state,
                "restarts": s.restarts,
                "last_exit": s.last_exit,
            }
            for s in self._slots
        ]

    # ---- inside

    def _slot_of(self, life: int) -> _Slot | None:
        return next((s for s in self._slots if s.child is not None and s.life == life), None)

    def _end_restarts(self) -> None:
        self._stopping = True
        for slot in self._slots:
            slot.cancel_timer()
            if slot.child is None:
                slot.state = "stopped"

    def _spawn(self, slot: _Slot) -> None:
        slot.timer = None
        slot.life = new_life()
        fd = self._death_pipe.fd
        argv = slot.spec.argv(slot.life, fd)
        slot.child = Child(
            slot.spec.name,
            slot.life,
            argv,
            environment=self._environment,
            inherited_fd=fd,
            on_line=self._line,
            on_exit=self._exited,
        )
        slot.state = "starting"
        self._quiet.clear()
        limit = self._config.start_timeout_s
        why = f"not ready {limit} s after its start"
        slot.timer = asyncio.get_running_loop().call_later(limit, slot.child.kill, why)
        self._watcher.child_started(slot.spec.name, slot.spec.role, slot.child.pid, slot.restarts)

    def _respawn(self, slot: _Slot) -> None:
        try:
            slot.restarts += 1
            self._spawn(slot)
        except OSError as e:  # fork failed: no memory, no process number
            self._end_of(slot, Death(outside=True, config=False, why=f"cannot be started: {e}"), [])

    def _line(self, child: Child, line: str) -> bool:
        """Progress is no words to quote."""
        if line.startswith(PROGRESS):
            try:
                progress = json.loads(line.removeprefix(PROGRESS))
            except ValueError:
                progress = None
            if isinstance(progress, dict):
                self._watcher.child_progress(child.name, progress)
                return False
        self._watcher.child_line(child.name, line)
        return True

    def _exited(self, child: Child, returncode: int) -> None:
        slot = next(s for s in self._slots if s.child is child)
        slot.cancel_timer()
        slot.child = None
        if all(s.child is None for s in self._slots):
            self._quiet.set()
        death = classify(returncode, child.killed_for)
        self._watcher.child_ended(slot.spec.name, slot.spec.role, slot.life, death)
        self._end_of(slot, death, child.last_words.lines())

    def _end_of(self, slot: _Slot, death: Death, words: list[str]) -> None:
        slot.last_exit = death.why
        slot.state = "stopped"
        if self._stopping:
            return
        who = f"{slot.spec.role} {slot.spec.name}: {death.why}"
        if death.config:
            self._watcher.gave_up(_cause(who, words), exit_codes.CONFIG)
            return
        verdict = slot.policy.exited(time.monotonic())
        if isinstance(verdict, GiveUp):
            self._watcher.gave_up(_cause(f"{who}; {verdict.why}", words), exit_codes.GAVE_UP)
            return
        slot.state = "backoff"
        loop = asyncio.get_running_loop()
        slot.timer = loop.call_later(verdict.after, self._respawn, slot)


def _cause(who: str, words: list[str]) -> str:
    if not words:
        return f"{who} (it said nothing)"
    return "\n    ".join([f"{who}; its last words:", *words])
