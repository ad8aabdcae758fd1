"""Children that end, crash, hang or speak: with /bin/sh as every child."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest

from conductor.shell import exit_codes
from conductor.shell.deaths import Death
from conductor.shell.supervisor import ChildSpec, Role, Supervisor
from protocol.config import SupervisionConfig

CONFIG = SupervisionConfig(backoff_ms=1, backoff_max_ms=4, max_restarts=3, start_timeout_s=60)
PATIENCE_S = 20


class Watch:
    """Records what the supervisor tells; `until` waits for it."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.progress: list[tuple[str, dict[str, Any]]] = []
        self.started: list[tuple[str, int, int]] = []
        self.ended: list[tuple[str, int, Death]] = []
        self.gave: list[tuple[str, int]] = []
        self._news = asyncio.Event()

    def child_line(self, name: str, line: str) -> None:
        self.lines.append((name, line))
        self._news.set()

    def child_progress(self, name: str, progress: dict[str, Any]) -> None:
        self.progress.append((name, progress))
        self._news.set()

    def child_started(self, name: str, role: Role, pid: int, restarts: int) -> None:
        self.started.append((name, pid, restarts))
        self._news.set()

    def child_ended(self, name: str, role: Role, life: int, death: Death) -> None:
        self.ended.append((name, life, death))
        self._news.set()

    def gave_up(self, cause: str, exit_code: int) -> None:
        self.gave.append((cause, exit_code))
        self._news.set()

    async def until(self, what: Callable[[], Any]) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not what():
                    self._news.clear()
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"not within {PATIENCE_S} s; heard: {vars(self)}") from None


class Nursery:
    def __init__(self) -> None:
        self.watch = Watch()
        self.supervisors: list[Supervisor] = []

    def start(
        self, script: str, config: SupervisionConfig = CONFIG, names: tuple[str, ...] = ("w0",)
    ) -> Supervisor:
        """Each child runs `script` with its life as $1 and the death pipe as $2."""

        def argv(life: int, fd: int) -> list[str]:
            return ["/bin/sh", "-c", script, "sh", str(life), str(fd)]

        specs = [ChildSpec(name, "worker", argv) for name in names]
        supervisor = Supervisor(specs, config, dict(os.environ), self.watch)
        self.supervisors.append(supervisor)
        supervisor.start()
        return supervisor


@pytest.fixture
async def nursery() -> AsyncIterator[Nursery]:
    nursery = Nursery()
    yield nursery
    for s in nursery.supervisors:
        s.kill_all("the test is over")
        await s.reap()
        s.close()


async def test_a_crash_is_learnt_and_the_next_incarnation_has_its_own_life(
    nursery: Nursery,
) -> None:
    s = nursery.start("kill -SEGV $$")
    w = nursery.watch
    await w.until(lambda: len(w.ended) >= 2)
    lives = [life for _, life, _ in w.ended]
    assert lives[0] != lives[1]
    assert w.ended[0][2] == Death(outside=False, config=False, why="ended by SIGSEGV")
    assert s.role_of(lives[0]) is None
    assert [r for _, _, r in w.started[:2]] == [0, 1]


async def test_a_crash_loop_ends_over_its_budget_with_the_last_words(nursery: Nursery) -> None:
    s = nursery.start("echo before; echo 'no such device' >&2; exit 3")
    w = nursery.watch
    await w.until(lambda: w.gave)
    (cause, status) = w.gave[0]
    assert status == exit_codes.GAVE_UP
    assert cause == (
        "worker w0: exit status 3; it ended again after 3 restarts within 300 s; its last words:\n"
        "    before\n    no such device"
    )
    assert len(w.started) == 4
    assert s.statistics()[0]["last_exit"] == "exit status 3"


async def test_a_configuration_error_is_never_restarted(nursery: Nursery) -> None:
    nursery.start("echo 'bad dtype' >&2; exit 78")
    w = nursery.watch
    await w.until(lambda: w.gave)
    assert w.gave[0][1] == exit_codes.CONFIG
    assert "bad dtype" in w.gave[0][0]
    assert len(w.started) == 1


async def test_a_signal_from_outside_charges_nobody_and_ours_is_the_steps_doing(
    nursery: Nursery,
) -> None:
    s = nursery.start("echo up; exec sleep 60")
    w = nursery.watch
    await w.until(lambda: w.lines)
    os.kill(w.started[0][1], signal.SIGKILL)
    await w.until(lambda: len(w.lines) >= 2)
    assert w.ended[0][2] == Death(outside=True, config=False, why="ended by SIGKILL")
    life = s.statistics()[0]["life"]
    assert s.kill(life, "a step has run for 9.0 s")
    await w.until(lambda: len(w.ended) >= 2)
    assert w.ended[1][1] == life
    assert w.ended[1][2] == Death(False, False, "killed: a step has run for 9.0 s")
    assert s.kill(life, "again") is False


async def test_a_child_that_does_not_get_ready_in_time_is_killed(nursery: Nursery) -> None:
    config = SupervisionConfig(start_timeout_s=1, max_restarts=0)
    s = nursery.start("exec sleep 60", config, ("slow", "quick"))
    quick = next(x["life"] for x in s.statistics() if x["name"] == "quick")
    s.mark_ready(quick)
    w = nursery.watch
    await w.until(lambda: w.gave)
    assert w.gave[0][0].startswith("worker slow: killed: not ready 1 s after its start")
    states = {x["name"]: x["state"] for x in s.statistics()}
    assert states == {"slow": "stopped", "quick": "ready"}


async def test_progress_is_apart_from_lines_and_last_words(nursery: Nursery) -> None:
    script = """
    echo 'podium-progress {"phase": "loading", "done": 1, "total": 2}' >&2
    echo 'podium-progress not json' >&2
    echo plain; printf 'no newline'; exit 78"""
    nursery.start(script)
    w = nursery.watch
    await w.until(lambda: w.gave)
    assert w.progress == [("w0", {"phase": "loading", "done": 1, "total": 2})]
    assert [line for _, line in w.lines] == ["podium-progress not json", "plain", "no newline"]
    assert '"phase"' not in w.gave[0][0]


async def test_only_the_last_lines_are_kept(nursery: Nursery) -> None:
    nursery.start("i=0; while [ $i -lt 100 ]; do echo line $i; i=$((i+1)); done; exit 78")
    w = nursery.watch
    await w.until(lambda: w.gave)
    assert len(w.lines) == 100
    told = w.gave[0][0].splitlines()[1:]
    assert told == [f"    line {i}" for i in range(70, 100)]


async def test_whatever_a_child_started_ends_with_it(nursery: Nursery) -> None:
    nursery.start("sleep 61 & echo $!; wait")
    w = nursery.watch
    await w.until(lambda: w.lines)
    grandchild = psutil.Process(int(w.lines[0][1]))
    os.kill(w.started[0][1], signal.SIGKILL)
    await w.until(lambda: w.ended)
    await asyncio.to_thread(psutil.wait_procs, [grandchild], PATIENCE_S)
    gone = not grandchild.is_running() or grandchild.status() == psutil.STATUS_ZOMBIE
    assert gone, f"{grandchild} outlived the child that started it"


async def test_children_are_out_of_reach_of_the_daemons_group_and_terminal(
    nursery: Nursery,
) -> None:
    nursery.start("echo up; exec sleep 60")
    w = nursery.watch
    await w.until(lambda: w.lines)
    pid = w.started[0][1]
    assert os.getpgid(pid) == pid != os.getpgid(0)
    assert os.getsid(pid) != os.getsid(0)


async def test_the_death_pipe_closes_with_the_supervisor(nursery: Nursery) -> None:
    """`cat` on the pipe returns only at its end: nobody else holds the writing side."""
    s = nursery.start('cat /proc/self/fd/"$2"; echo closed', names=("w0", "w1"))
    w = nursery.watch
    await w.until(lambda: len(w.started) == 2)
    nursery.supervisors.remove(s)
    s.close()
    await w.until(lambda: sorted(w.lines) == [("w0", "closed"), ("w1", "closed")])
    s.kill_all("over")
    await s.reap()


async def test_stop_asks_first_and_kills_who_stays(nursery: Nursery) -> None:
    s = nursery.start("trap 'exit 0' TERM; echo up; while :; do sleep 0.01; done", names=("good",))
    stubborn = nursery.start("trap '' TERM; echo up; while :; do sleep 0.01; done", names=("bad",))
    w = nursery.watch
    await w.until(lambda: len(w.lines) == 2)
    asked: list[Role] = []

    def ask(role: Role, life: int) -> bool:
        asked.append(role)
        return False

    for each in (s, stubborn):
        each.mark_ready(each.statistics()[0]["life"])
    await s.stop(ask, grace_s=PATIENCE_S)
    await stubborn.stop(ask, grace_s=0.1)
    assert asked == ["worker", "worker"]
    ends = {name: death.why for name, _, death in w.ended}
    assert ends["good"] == "exit status 0"
    assert ends["bad"].startswith("killed: still there")
    assert len(w.started) == 2, "a stopped child was started again"


async def test_stop_does_not_wait_for_who_still_starts_or_waits_to(nursery: Nursery) -> None:
    config = SupervisionConfig(backoff_ms=60_000, backoff_max_ms=60_000)
    waits = nursery.start("exit 1", config)
    w = nursery.watch
    await w.until(lambda: w.ended)
    assert waits.statistics()[0]["state"] == "backoff"
    starts = nursery.start("exec sleep 60", config, ("w1",))

    def never(role: Role, life: int) -> bool:
        raise AssertionError("asked a child that holds nothing")

    await waits.stop(never, PATIENCE_S)
    await starts.stop(never, PATIENCE_S)
    assert [x["state"] for s in (waits, starts) for x in s.statistics()] == ["stopped"] * 2
