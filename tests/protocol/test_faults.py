"""Fault points: off by default, armed by configuration, each action what it says."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from protocol import config, faults
from protocol.errors import ConfigError

ROOT = Path(__file__).parents[2]
HERE = "worker.main"
MODELS = {"m": {"kind": "reference"}}


def arm(*specs: dict[str, Any], process: str = "w0") -> faults.Point:
    parsed = config.parse({"models": MODELS, "faults": [{"point": HERE, **s} for s in specs]})
    faults.install(parsed.faults, process)
    return faults.point(HERE)


@pytest.fixture(autouse=True)
def _disarmed() -> Any:
    yield
    faults.install((), "")


def passes(point: faults.Point, n: int) -> list[int]:
    """The passes at which it raised, from 1."""
    fired: list[int] = []
    for i in range(1, n + 1):
        try:
            if point.act is not None:
                point.act()
        except faults.PlantedFault:
            fired.append(i)
    return fired


def test_nothing_is_armed_by_default() -> None:
    assert all(faults.point(name).act is None for name in faults.POINTS)


def test_every_point_is_passed_somewhere_and_no_other() -> None:
    sources = [p for d in ("protocol", "conductor", "worker") for p in (ROOT / d).rglob("*.py")]
    found = [x for p in sources for x in re.findall(r'faults\.point\("(.+)"\)', p.read_text())]
    assert sorted(set(found)) == sorted(faults.POINTS)
    assert sorted(found).count(HERE) == 2  # its use, and the docstring's example


@pytest.mark.parametrize(
    ("spec", "fired"),
    [
        ({}, [1, 2, 3, 4, 5, 6]),
        ({"times": 2}, [1, 2]),
        ({"after": 3}, [4, 5, 6]),
        ({"after": 1, "every": 2}, [2, 4, 6]),
        ({"after": 1, "every": 3, "times": 1}, [2]),
        ({"where": "w0"}, [1, 2, 3, 4, 5, 6]),
        ({"where": "w1"}, []),
    ],
)
def test_when_it_fires(spec: dict[str, Any], fired: list[int]) -> None:
    assert passes(arm(spec), 6) == fired


def test_several_faults_at_one_point() -> None:
    assert passes(arm({"after": 3, "times": 1}, {"times": 1}), 6) == [1, 4]


def test_installing_again_disarms_what_is_not_named() -> None:
    assert arm({}).act is not None
    faults.install((), "w0")
    assert faults.point(HERE).act is None


def test_once_over_all_processes(tmp_path: Path) -> None:
    spec = {"once_file": str(tmp_path / "fired")}
    assert passes(arm(spec), 3) == [1]
    assert passes(arm(spec), 3) == []  # as another process


def test_whenever_a_file_is_there(tmp_path: Path) -> None:
    order = tmp_path / "now"
    point = arm({"when_file": str(order)})
    assert passes(point, 2) == []
    order.touch()
    assert passes(point, 3) == [1]
    assert not order.exists()


def test_memory_runs_out() -> None:
    point = arm({"action": "memory"})
    assert point.act is not None
    with pytest.raises(MemoryError):
        point.act()


def test_slow_goes_on() -> None:
    point = arm({"action": "slow", "ms": 1})
    assert point.act is not None
    point.act()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"point": "worker.mian"},
            r"faults\.0\.point: no fault point .*'worker.main'",
        ),
        ({"point": HERE, "action": "rise"}, r"faults\.0\.action: .*did you mean 'raise'"),
        ({"point": HERE, "evry": 2}, r"faults\.0\.evry: unknown key; did you mean 'every'"),
    ],
)
def test_a_mistake_is_explained(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config.parse({"models": MODELS, "faults": [spec]})


TICKER = """
import threading, time
from protocol import faults
ticks = 0
def count():
    global ticks
    while True:
        ticks += 1
        time.sleep(0.01)
threading.Thread(target=count, daemon=True).start()
threading.Thread(target=faults.perform, args=(%r, "here"), daemon=True).start()
time.sleep(0.3)
print(ticks > 1, flush=True)
"""


def process(action: str, *, wait: bool) -> tuple[int | None, str]:
    """The exit status of a process whose second thread performs `action`; its output."""
    p = subprocess.Popen(
        [sys.executable, "-c", TICKER % action], cwd=ROOT, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    try:
        told, _ = p.communicate(timeout=60 if wait else 3)
        return p.returncode, told
    except subprocess.TimeoutExpired:
        p.kill()
        told, _ = p.communicate()
        return None, told


@pytest.mark.parametrize(("action", "status"), [("exit", 70), ("segv", -11), ("kill", -9)])
def test_crashes_end_the_whole_process(action: str, status: int) -> None:
    code, told = process(action, wait=True)
    assert (code, told) == (status, f"planted fault: {action} in here\n")


def test_a_hang_without_the_gil_stops_one_thread_with_it_all() -> None:
    assert process("hang", wait=True) == (0, "planted fault: hang in here\nTrue\n")
    code, told = process("hang_gil", wait=False)
    assert code is None, "the main thread went on"
    assert told == "planted fault: hang_gil in here\n"
