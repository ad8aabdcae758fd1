"""conductor: what a worker-step costs the conductor, beside a raw echo of the same bytes.

Stress: every worker-step sends one `Report` of progress on all its rows, all workers at once.
Steady: what a worker really sends, beats and coalesced progress, at the real rates.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path

from scripts.bench import conductor_servers as servers
from scripts.bench import record
from scripts.bench.conductor_load import Load
from scripts.bench.record import Goal, Plot, Record, Table

GOAL = 1.5
STEP_MS = 5.0  # of a decode step, to tell steady CPU per worker-step
GRID = (
    (1, 64), (4, 64), (16, 1), (16, 64), (16, 1024), (64, 1), (64, 16), (64, 64), (64, 256),
)  # fmt: skip
IDLE_BESIDE = (64, 64)
IDLE = (0, 1_000, 10_000, 100_000)
WINDOWS = 15
MESSAGES = 1600  # of a window

Shape = tuple[int, int]  # workers, rows each


def measure(smoke: bool) -> Record:
    grid: tuple[Shape, ...] = ((2, 4),) if smoke else GRID
    beside, idle = (grid[0], (50,)) if smoke else (IDLE_BESIDE, IDLE)
    windows, messages = (1, 40) if smoke else (WINDOWS, MESSAGES)
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        address = servers.address(Path(folder))
        stress = [_stress(address, s, windows, messages) for s in grid]
        waiting = [_stress(address, beside, windows, messages, n) for n in idle]
        steady = _steady(address, *((2, 4, 0.6, 1) if smoke else (64, 64, 3.0, 5)))
    return _record(stress, waiting, steady, windows)


# ---- one setting each


@dataclass(frozen=True, slots=True)
class Found:
    """µs of CPU per worker-step, medians of the windows; `ratio`: median of neighbours' ratios."""

    workers: int
    rows: int
    idle: int
    conductor: float
    echo: float
    ratio: float


def _stress(address: str, shape: Shape, windows: int, messages: int, idle: int = 0) -> Found:
    """Bursts, paced so that no core is full: what is compared is the cost, not the limit."""
    workers, rows = shape
    load = Load(
        address, workers, rows, echo=False, steady=False, rounds=max(1, messages // workers),
        pace_s=0.0005 + workers * 80e-6, seconds=0.0,
    )  # fmt: skip
    run = servers.run(load, windows, idle)
    sent = sum(w.messages for w in run.conductor)
    if run.counts["dropped"] or run.counts["received"] != sent:
        raise AssertionError(f"{sent} messages were sent; the conductor counts {run.counts}")
    if run.counts["open"] != workers * rows + idle:
        raise AssertionError(f"requests were lost on the way: {run.counts}")
    ratios = [a.us / b.us for a, b in zip(run.conductor, run.echo, strict=True)]
    ours, raw = ([w.us for w in windows] for windows in (run.conductor, run.echo))
    return Found(
        workers, rows, idle, record.median(ours), record.median(raw), record.median(ratios)
    )


def _steady(
    address: str, workers: int, rows: int, seconds: float, windows: int
) -> dict[str, float]:
    """Shares of one core, for windows of so many `seconds` of beats and progress."""
    load = Load(address, workers, rows, False, True, 0, 0.0, seconds)
    run = servers.run(load, windows)
    ours = record.median([w.cpu / w.wall for w in run.conductor])
    return {
        "workers": workers,
        "rows": rows,
        "messages": record.median([w.messages / w.wall for w in run.conductor]),
        "conductor": ours,
        "echo": record.median([w.cpu / w.wall for w in run.echo]),
        "step_us": 1e6 * ours / (workers * 1000 / STEP_MS),
    }


# ---- the record


def _record(
    stress: list[Found], waiting: list[Found], steady: dict[str, float], windows: int
) -> Record:
    worst = max(f.ratio for f in stress)
    most = max(f.workers for f in stress)
    by_rows = [f for f in stress if f.workers == most]
    rows_growth = by_rows[-1].ratio / by_rows[0].ratio
    idle_growth = waiting[-1].ratio / waiting[0].ratio
    against_step = steady["step_us"] / min(f.echo for f in stress)
    summary = [
        Goal("a Report of all rows each worker-step ÷ echo, worst", _r(worst), "×", f"≤ {GOAL}",
             worst <= GOAL),
        Goal("most rows ÷ fewest, most workers", _r(rows_growth), "×", "flat", rows_growth <= 1.5),
        Goal(f"{waiting[-1].idle:,} idle requests ÷ none", _r(idle_growth), "×", "flat",
             idle_growth <= 1.25),
        Goal(f"steady, {steady['workers']:.0f} workers: share of a core",
             _r(100 * steady["conductor"]), "%"),
        Goal(f"steady, per worker-step of {STEP_MS:g} ms ÷ one echo", _r(against_step), "×",
             f"≤ {GOAL}", against_step <= GOAL),
    ]  # fmt: skip
    return Record(
        name="conductor",
        what="CPU of the conductor's process per worker-step: real Links, Machine and CoreLoop "
        "under uvloop, over ZeroMQ ipc from another process.",
        against="a raw poll-and-drain echo of the same bytes through the same channel class",
        config={
            "windows": windows,
            "taken": "medians; ratios of neighbouring windows",
            "step_ms": STEP_MS,
        },
        seeds=[1],
        summary=summary,
        tables=[
            Table(
                "Every worker sends a `Report` of progress on all its rows at each step",
                ["workers", "rows each", "conductor µs", "echo µs", "ratio"],
                [[f.workers, f.rows, _r(f.conductor), _r(f.echo), _r(f.ratio)] for f in stress],
            ),
            Table(
                "The same beside requests that wait for a place",
                ["idle requests", "conductor µs", "echo µs", "ratio"],
                [[f.idle, _r(f.conductor), _r(f.echo), _r(f.ratio)] for f in waiting],
            ),
            Table(
                "Steady: a beat each 200 ms and progress each 500 ms from every worker",
                ["workers", "rows each", "messages/s", "conductor, % of a core",
                 "echo, % of a core", "conductor, µs per worker-step"],
                [[int(steady["workers"]), int(steady["rows"]), _r(steady["messages"]),
                  _r(100 * steady["conductor"]), _r(100 * steady["echo"]), _r(steady["step_us"])]],
            ),
        ],
        notes=[
            "A steady worker sends no message per step, so the steady share does not depend on "
            "how long steps are; the stress is what it would cost if it did.",
            "CPU time of the whole process, ZeroMQ's I/O thread included. With few workers a "
            "message is a wake-up of two threads, and that is nearly all of its cost on both "
            "sides; those settings vary by a third from run to run.",
        ],
        plot=Plot(
            f"CPU per worker-step, {most} workers",
            "rows of each worker",
            "µs of CPU",
            {
                "conductor": [(f.rows, f.conductor) for f in by_rows],
                "raw echo": [(f.rows, f.echo) for f in by_rows],
            },
            "x",
        ),
    )  # fmt: skip


def _r(value: float) -> float:
    return record.rounded(value)


if __name__ == "__main__":
    record.main(measure, __doc__ or "")
