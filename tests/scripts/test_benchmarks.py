"""The benchmarks run and record what they say; nothing here looks at how fast they were."""

import ast
import importlib
import json
import math
import os
from pathlib import Path

import pytest

from scripts.bench import idle, record, report, timer_worker
from scripts.bench.record import Goal, Plot, Record, Table

NAMES = ("conductor", "fan_out", "growth", "hand_off", "idle")
DAEMONS = ("idle",)


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.processes] if n in DAEMONS else []) for n in NAMES],
)
def test_a_benchmark_runs_and_its_record_is_whole(name: str) -> None:
    found: Record = importlib.import_module(f"scripts.bench.{name}").measure(True)
    assert found.name == name
    told = json.loads(found.to_json())
    assert told["summary"]
    for goal in told["summary"]:
        assert math.isfinite(goal["value"])
        assert (goal["met"] is None) == (goal["goal"] == "")
    for table in told["tables"]:
        assert table["rows"]
        assert {len(row) for row in table["rows"]} == {len(table["columns"])}
    assert all(points for points in found.plot.lines.values())


def test_every_benchmark_has_its_record_and_its_plot() -> None:
    for name in NAMES:
        told = json.loads((record.OUT / f"{name}.json").read_text(encoding="utf-8"))
        assert told["name"] == name
        assert not told["smoke"]
        assert (record.OUT / f"{name}.png").stat().st_size < 100_000


# ---- the record and the report


def a_record(met: bool | None = True) -> Record:
    return Record(
        name="made_up", what="A question.", against="nothing", config={"steps": 3}, seeds=[4],
        summary=[Goal("figure", 1234.5, "µs", "≤ 2" if met is not None else "", met)],
        tables=[Table("Figures", ["rows", "µs"], [[1024, 0.5]])], notes=["A note."],
        plot=Plot("Lines", "x", "y", {"one": [(1, 2), (2, 3)]}, "xy"),
    )  # fmt: skip


def test_the_page_shows_what_the_records_hold_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "docs" / "benchmarks"
    folder.mkdir(parents=True)
    assert "##" not in report.render(tmp_path)
    path = folder / "made_up.json"
    path.write_text(a_record().to_json(), encoding="utf-8")
    page = report.render(tmp_path)
    for part in (
        "## made_up", "1,234 µs", "≤ 2 | met", "| 1,024 | 0.5 |", "- A note.", "steps 3",
        "seeds [4]", "(benchmarks/made_up.png)", "cores", "python",
    ):  # fmt: skip
        assert part in page, part
    path.write_text(a_record(met=False).to_json(), encoding="utf-8")
    assert "≤ 2 | **not met**" in report.render(tmp_path)


def test_a_record_is_written_with_its_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = a_record()
    found.write(tmp_path)
    assert (tmp_path / "made_up.json").read_text(encoding="utf-8") == found.to_json()
    assert (tmp_path / "made_up.png").read_bytes()[:4] == b"\x89PNG"


def test_fits() -> None:
    assert record.exponent([(n, 3.0 * n**2) for n in (1, 2, 4)]) == pytest.approx(2)
    assert record.exponent([(n, 5.0) for n in (1, 2, 4)]) == pytest.approx(0)
    assert record.slope([(n, 2.0 * n + 7) for n in (1, 2, 4)]) == pytest.approx((2, 7))


# ---- the device that only takes time


def test_the_timer_device_counts_what_it_waited_for_its_next_launch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr("time.perf_counter", lambda: now)
    device = timer_worker.TimerDevice(0.01)
    device.launch(4)
    event = device.new_event()
    event.record()
    now = 100.004
    device.launch(4)  # behind the first: the device goes on without a gap
    assert not event.query()
    now = 100.010
    assert event.query()
    now = 100.025  # the second ended at 100.020
    device.launch(4)
    assert [rows for rows, _ in device.launches] == [4, 4, 4]
    assert [idle for _, idle in device.launches][1:] == pytest.approx([0.0, 0.005])
    assert device.busy_until == pytest.approx(100.035)


# ---- an idle daemon


def test_use_counts_this_process(tmp_path: Path) -> None:
    before = idle.use(os.getpid())
    sum(range(2_000_000))
    cpu, switches = idle.use(os.getpid()).since(before)
    assert cpu > 0
    assert switches >= 0


SLEEPS = {
    "conductor/gateway/health.py": "a snapshot each half second, or /livez could not tell its age",
    "conductor/shell/runtime_dir.py": "at most once: the pid of who holds the lock",
    "worker/models/reference.py": "a step that takes time, for tests",
    "protocol/faults.py": "planted faults",
}


def test_nothing_else_of_the_product_sleeps() -> None:
    """Whoever waits, waits for an event; each exception says why."""
    found = {
        path.relative_to(record.ROOT).as_posix()
        for package in ("protocol", "conductor", "worker")
        for path in (record.ROOT / package).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("time.sleep", "asyncio.sleep", "sleep")
    }
    assert found == set(SLEEPS)
