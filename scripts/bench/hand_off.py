"""hand_off: how long the device idles between steps of a steady decode.

The product's engine, threads, loop and links on a device that takes 0.3, 1 or 5 ms a step and
computes nothing (timer_worker.py), with 1, 2 and 3 steps in flight.
"""

from dataclasses import dataclass

from scripts.bench import record, timer_worker
from scripts.bench.record import Goal, Plot, Record, Table
from scripts.bench.timer_worker import Steady

GOAL = 0.01
STEP_MS = (0.3, 1.0, 5.0)
DEPTHS = (1, 2, 3)
ROWS = (1, 32, 256)
DEFAULT_DEPTH = 2
SECONDS = 0.6  # of device time in a run
REPEATS = 3
STRETCH = 20  # steps


@dataclass(frozen=True, slots=True)
class Found:
    step_ms: float
    depth: int
    rows: int
    runs: list[Steady]

    @property
    def ratio(self) -> float:
        """Idle ÷ busy in the better quarter of all stretches of 20 steps: what the hand-off does
        while nothing else takes its cores."""
        stretches = sorted(w for r in self.runs for w in r.windows(STRETCH))
        return stretches[len(stretches) // 4]

    @property
    def mean(self) -> float:
        return min(r.ratio for r in self.runs)

    @property
    def late(self) -> float:
        return min(r.late for r in self.runs)

    @property
    def cpu(self) -> float:
        return min(r.cpu["process"] for r in self.runs)


def measure(smoke: bool) -> Record:
    steps, depths, rows = ((1.0,), (2,), (2,)) if smoke else (STEP_MS, DEPTHS, ROWS)
    repeats = 1 if smoke else REPEATS
    found = [
        Found(s, d, r, [_run(s, d, r, 20 if smoke else 0) for _ in range(repeats)])
        for s in steps
        for d in depths
        for r in rows
    ]
    return _record(found, repeats)


def _run(step_ms: float, depth: int, rows: int, steps: int) -> Steady:
    steps = steps or int(1000 * SECONDS / step_ms)
    return timer_worker.steady(step_s=step_ms / 1000, depth=depth, rows=rows, steps=steps)


def _record(found: list[Found], repeats: int) -> Record:
    summary = []
    for step_ms in sorted({f.step_ms for f in found}, reverse=True):
        for rows in sorted({f.rows for f in found}):
            for f in found:
                if (f.step_ms, f.rows, f.depth) == (step_ms, rows, DEFAULT_DEPTH):
                    what = f"{step_ms:g} ms steps, {rows} rows, {f.depth} in flight: idle"
                    value = record.rounded(100 * f.ratio)
                    summary.append(Goal(what, value, "%", "≤ 1", f.ratio <= GOAL))
    return Record(
        name="hand_off",
        what="Device idle time between steps of a steady decode ÷ device busy time.",
        against="0: a device that always finds its next step",
        config={"device seconds": SECONDS, "repeats": repeats,
                "taken": f"better quarter of stretches of {STRETCH} steps",
                "default depth": DEFAULT_DEPTH},
        seeds=[],
        summary=summary,
        tables=[
            Table(
                "By step time, steps in flight and rows",
                ["step, ms", "in flight", "rows", "idle, %", "mean idle, %", "late steps, %",
                 "host CPU a step, µs"],
                [[f.step_ms, f.depth, f.rows, record.rounded(100 * f.ratio),
                  record.rounded(100 * f.mean), record.rounded(100 * f.late),
                  record.rounded(f.cpu)] for f in found],
            ),
        ],
        notes=[
            "`idle` is that of the better quarter of all stretches, `mean idle` of the best whole "
            "run: the two differ by what other work on these cores took. "
            "A late step found the device idle for more than 1 % of a step. With one step in "
            "flight every step waits for the whole way round: completion, read-back, stops, "
            "frames, planning, launch.",
            "The host's CPU is that of the worker's process, all threads. Where it exceeds the "
            "step, no number of steps in flight helps; where other work has the cores, a thread's "
            "turn comes late, and that is counted here as idle device.",
        ],
        plot=Plot(
            "Device idle ÷ busy at 32 rows" if any(f.rows == 32 for f in found) else "Device idle",
            "step, ms",
            "idle, %",
            {
                f"{d} in flight": [
                    (f.step_ms, 100 * f.ratio)
                    for f in found
                    if f.depth == d and f.rows == (32 if any(g.rows == 32 for g in found) else 2)
                ]
                for d in sorted({f.depth for f in found})
            },
            "x",
        ),
    )  # fmt: skip


if __name__ == "__main__":
    record.main(measure, __doc__ or "")
