"""Promises that need a daemon of their own (`-m slow`); the table is in test_promises.py."""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from protocol.client.async_client import AsyncClient
from tests.support.processes import ROOT, Daemon, running_daemon
from worker.models.reference_hash import reference_tokens

pytestmark = [pytest.mark.slow, pytest.mark.processes, pytest.mark.timeout(240)]

PROMPT = [50, 51, 52]


def config(step_ms: int = 10, **more: Any) -> dict[str, Any]:
    return {
        "name": "slow",
        "models": {"reference": {"kind": "reference", "options": {"step_ms": step_ms}}},
        "workers": [{"name": "w0", "threads": 1}],
        "gateway": {"port": 0},
        **more,
    }


async def ask(d: Daemon, count: int) -> list[int]:
    async with AsyncClient(d.endpoints) as client:
        return await client.generate("reference", PROMPT, max_tokens=count).collect()


def test_p6_a_legal_long_step_is_not_a_hang(tmp_path: Path) -> None:
    """Each step lasts ten seconds, five times what a worker may be silent."""
    with running_daemon(config(10_000, supervision={"silence_ms": 2000}), tmp_path) as d:
        assert asyncio.run(ask(d, 2)) == reference_tokens(PROMPT, 2)
        assert d.snapshot()["machine"]["counters"].get("workers_lost", 0) == 0


def test_p8_a_killed_conductor_leaves_nothing_under_load(tmp_path: Path) -> None:
    shared_memory = set(os.listdir("/dev/shm"))
    (tmp_path / "again").mkdir()
    first = Daemon(config(), tmp_path).wait_ready()
    second = None
    try:

        async def load() -> None:
            async with AsyncClient(first.endpoints) as client:
                streams = [client.generate("reference", [40 + i], max_tokens=500) for i in range(9)]
                await asyncio.gather(*(anext(s) for s in streams))
                first.signal(signal.SIGKILL)
                await asyncio.to_thread(first.wait)
                await asyncio.to_thread(first.wait_gone, 2.0)

        asyncio.run(load())
        assert set(os.listdir("/dev/shm")) <= shared_memory
        second = Daemon(config(runtime_dir=str(first.root)), tmp_path / "again").wait_ready()
        assert asyncio.run(ask(second, 20)) == reference_tokens(PROMPT, 20)
        assert second.stop() == 0
    finally:
        first.close()
        if second is not None:
            second.close()


def test_p9_a_signal_to_the_whole_group_lets_streams_finish(tmp_path: Path) -> None:
    d = Daemon(config(), tmp_path).wait_ready()
    try:

        async def stream() -> list[int]:
            async with AsyncClient(d.endpoints) as client:
                s = client.generate("reference", PROMPT, max_tokens=200)
                await anext(s)
                os.killpg(d.process.pid, signal.SIGTERM)
                return await s.collect()

        assert asyncio.run(stream()) == reference_tokens(PROMPT, 200)
        assert d.wait() == 0
        d.wait_gone(1.0)
    finally:
        d.close()


JUMPS = """
import itertools, time
_real, _n = time.time, itertools.count()
time.time = lambda: _real() + 1e8 * ((-1) ** next(_n))
time.time_ns = lambda: int(time.time() * 1e9)
"""


def test_p23_a_wall_clock_that_jumps_changes_nothing(tmp_path: Path) -> None:
    """In every process, three years to and fro at each look."""
    (tmp_path / "shim").mkdir()
    (tmp_path / "shim" / "sitecustomize.py").write_text(JUMPS, encoding="utf-8")
    path = os.pathsep.join([str(tmp_path / "shim"), str(ROOT)])
    d = Daemon(config(), tmp_path, environment={"PYTHONPATH": path}).wait_ready()
    try:

        async def both() -> None:
            async with AsyncClient(d.endpoints) as client:
                s = client.generate("reference", PROMPT, max_tokens=300, deadline_ms=60_000)
                assert await s.collect() == reference_tokens(PROMPT, 300)

        asyncio.run(both())
        machine = d.snapshot()["machine"]
        assert machine["counters"].get("workers_lost", 0) == 0
        assert machine["counters"].get("owners_lost", 0) == 0
        assert machine["requests"]["closed"] == {"length": 1}
        assert d.stop() == 0
    finally:
        d.close()


def test_p24_two_daemons_started_at_once_live_apart(tmp_path: Path) -> None:
    daemons: list[Daemon] = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            daemons.append(Daemon(config(), tmp_path / name))
        for d in daemons:
            d.wait_ready()

        async def both() -> list[list[int]]:
            return await asyncio.gather(*(ask(d, 50) for d in daemons))

        assert asyncio.run(both()) == [reference_tokens(PROMPT, 50)] * 2
        assert daemons[0].stop() == 0
        assert asyncio.run(ask(daemons[1], 20)) == reference_tokens(PROMPT, 20)
        assert daemons[1].stop() == 0
    finally:
        for d in daemons:
            d.close()


def test_p24_of_two_started_at_once_in_one_place_one_names_the_other(tmp_path: Path) -> None:
    daemons: list[Daemon] = []
    try:
        for name in ("one", "two"):
            (tmp_path / name).mkdir()
            place = {"runtime_dir": str(daemons[0].root)} if daemons else {}
            daemons.append(Daemon({**config(), **place}, tmp_path / name))
        (owner,) = [d for d in daemons if _serves(d)]
        (other,) = [d for d in daemons if d is not owner]
        assert other.wait() == 75
        assert f"in use by another podium daemon, pid {owner.process.pid}" in other.log
        assert asyncio.run(ask(owner, 20)) == reference_tokens(PROMPT, 20)
        assert owner.stop() == 0
    finally:
        for d in daemons:
            d.close()


def _serves(d: Daemon) -> bool:
    try:
        d.wait_ready()
    except AssertionError:
        return False
    return d.process.poll() is None
