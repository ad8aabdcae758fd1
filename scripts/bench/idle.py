"""idle: what a daemon costs that has nothing to do.

`podium serve` with one worker of the `reference` model and the gateway, ready and left alone. CPU
and voluntary context switches of each process, all threads: a thread that polls by sleeping shows
as switches that no message explains.
"""

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from scripts.bench import record
from scripts.bench.record import Goal, Plot, Record, Table
from tests.support.processes import Daemon

GOAL = 2.0  # per cent of a core
SECONDS = 10.0
REPEATS = 3
CONFIG: Mapping[str, Any] = {
    "models": {"m": {"kind": "reference"}},
    "workers": [{"name": "w0", "threads": 1}],
    "gateway": {"port": 0},
}


@dataclass(frozen=True, slots=True)
class Use:
    """Seconds of CPU and voluntary switches so far, by thread id."""

    cpu: dict[int, float]
    switches: dict[int, int]

    def since(self, before: "Use") -> tuple[float, int]:
        """Threads that began meanwhile count from 0."""
        cpu = sum(c - before.cpu.get(t, 0.0) for t, c in self.cpu.items())
        switches = sum(s - before.switches.get(t, 0) for t, s in self.switches.items())
        return cpu, switches


def use(pid: int) -> Use:
    """From /proc: `schedstat` has nanoseconds where `stat` has ticks."""
    cpu: dict[int, float] = {}
    switches: dict[int, int] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            nanoseconds = int((task / "schedstat").read_text(encoding="ascii").split()[0])
            status = (task / "status").read_text(encoding="utf-8")
        except FileNotFoundError:
            continue  # it ended between the two looks
        told = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        cpu[int(task.name)] = nanoseconds / 1e9
        switches[int(task.name)] = int(told["voluntary_ctxt_switches"])
    return Use(cpu, switches)


@dataclass(frozen=True, slots=True)
class Found:
    name: str
    threads: int
    percent: float
    switches: float  # a second


def watch(processes: Mapping[str, int], seconds: float) -> list[Found]:
    """Their use over `seconds`, by name."""
    before = {name: use(pid) for name, pid in processes.items()}
    start = time.monotonic()
    time.sleep(seconds)  # being idle is what is measured
    passed = time.monotonic() - start
    found: list[Found] = []
    for name, pid in processes.items():
        now = use(pid)
        cpu, switches = now.since(before[name])
        found.append(Found(name, len(now.cpu), 100 * cpu / passed, switches / passed))
    return found


def processes(daemon: Daemon) -> dict[str, int]:
    children = {c["name"]: c["pid"] for c in daemon.snapshot()["children"]}
    return {"conductor": daemon.process.pid, **children}


def measure(smoke: bool) -> Record:
    seconds, repeats = (0.5, 1) if smoke else (SECONDS, REPEATS)
    with tempfile.TemporaryDirectory(prefix="podium-bench-") as folder:
        daemon = Daemon(CONFIG, Path(folder))
        try:
            daemon.wait_ready()
            known = processes(daemon)
            time.sleep(seconds / 5)
            runs = [watch(known, seconds) for _ in range(repeats)]
            resident = {n: psutil.Process(pid).memory_info().rss for n, pid in known.items()}
        finally:
            daemon.close()
    return _record(runs, resident, seconds, repeats)


def _record(
    runs: list[list[Found]], resident: dict[str, int], seconds: float, repeats: int
) -> Record:
    best = [min(each, key=lambda f: f.percent) for each in zip(*runs, strict=True)]
    calm = [min(f.switches for f in each) for each in zip(*runs, strict=True)]
    r = record.rounded
    return Record(
        name="idle",
        what="CPU and wake-ups of a daemon without requests, by process.",
        against="0",
        config={"seconds": seconds, "repeats": repeats, "taken": "least of the repeats",
                "beat_ms": 200},
        seeds=[],
        summary=[
            Goal(f"{f.name}: share of a core", r(f.percent), "%", f"< {GOAL:g}", f.percent < GOAL)
            for f in best
        ],
        tables=[
            Table(
                f"Over {seconds:g} s",
                ["process", "threads", "CPU, % of a core", "voluntary switches/s", "MiB resident"],
                [
                    [f.name, f.threads, r(f.percent), r(switches), resident[f.name] >> 20]
                    for f, switches in zip(best, calm, strict=True)
                ],
            ),
        ],
        notes=[
            "Beats go both ways 5 times a second on every control link, and each is a wake-up of a "
            "loop and of ZeroMQ's threads on both ends; the gateway's client ticks 10 times a "
            "second, its health check reads a snapshot twice a second. Nothing else wakes up.",
        ],
        plot=Plot(
            "CPU of an idle daemon", "run", "% of a core",
            {f.name: [(i, run[k].percent) for i, run in enumerate(runs, 1)]
             for k, f in enumerate(best)},
        ),
    )  # fmt: skip


if __name__ == "__main__":
    record.main(measure, __doc__ or "")
