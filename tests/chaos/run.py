"""`python -m tests.chaos.run --seeds 0..299 --json out.json`: scenarios by the number.

A line a seed: what came of it and whom it killed. On a violation also the story and the end of the
daemon's log, and the next seed gets a new daemon. Exit status 1 if anything was violated.
"""

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.chaos import scenario
from tests.chaos.driver import Outcome, Run
from tests.chaos.leaks import Baseline
from tests.chaos.scenario import Scenario
from tests.support.processes import Daemon, running_daemon

SEEDS_A_DAEMON = 50
CALM = 7  # a seed without strikes: what it leaves running is the baseline


class Chaos:
    """A daemon with every fault point armed, and what it is at rest."""

    def __init__(self, daemon: Daemon, orders: Path) -> None:
        self.daemon = daemon
        self._orders = orders
        self._baseline: Baseline | None = None
        first = self.run(CALM)
        assert not first.violations, daemon.story("\n".join(first.violations))
        self._baseline = Baseline.of(daemon)

    def run(self, seed: int) -> Outcome:
        return self.play(scenario.make(seed))

    def play(self, scene: Scenario) -> Outcome:
        return asyncio.run(self._play(scene))

    async def _play(self, scene: Scenario) -> Outcome:
        return await Run(self.daemon, self._orders, scene).run(self._baseline)


@contextmanager
def chaos() -> Iterator[Chaos]:
    with tempfile.TemporaryDirectory(prefix="podium-chaos-") as folder:
        orders = Path(folder) / "orders"
        orders.mkdir()
        with running_daemon(scenario.deployment(orders), Path(folder)) as daemon:
            yield Chaos(daemon, orders)


def line(o: Outcome) -> str:
    """One seed for people."""
    ends = " ".join(f"{reason}:{n}" for reason, n in sorted(o.ends.items()))
    told = f"seed {o.seed:4d}  {o.seconds:5.1f} s  {o.requests:3d} requests  {o.tokens:5d} tokens"
    told += f"  attempts {o.attempts}  lost {o.losses}  pids {o.pids}  {ends}"
    return told + (f"  VIOLATIONS {len(o.violations)}" if o.violations else "")


def run_seeds(seeds: Sequence[int]) -> list[Outcome]:
    """All of them, in order, printing each as it ends."""
    done: list[Outcome] = []
    while len(done) < len(seeds):
        with chaos() as c:
            for seed in seeds[len(done) :][:SEEDS_A_DAEMON]:
                outcome = c.run(seed)
                done.append(outcome)
                print(line(outcome), flush=True)
                if outcome.violations:
                    story = "\n  ".join([*outcome.story, *outcome.violations])
                    print(c.daemon.story(f"  {story}"), flush=True)
                    break
    return done


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """For docs/benchmarks: the seeds, what came of them, the machine."""
    ends: Counter[str] = Counter()
    for o in outcomes:
        ends.update(o.ends)
    return {
        "seeds": [o.seed for o in outcomes],
        "violations": {str(o.seed): o.violations for o in outcomes if o.violations},
        "requests": sum(o.requests for o in outcomes),
        "tokens": sum(o.tokens for o in outcomes),
        "ends": dict(sorted(ends.items())),
        "workers_lost": sum(o.losses for o in outcomes),
        "highest_attempt": max(o.attempts for o in outcomes),
        "scrapes": sum(o.scrapes for o in outcomes),
        "seconds": round(sum(o.seconds for o in outcomes), 1),
        "machine": {
            "cpu": _cpu(), "cores": len(os.sched_getaffinity(0)),
            "kernel": platform.release(), "python": platform.python_version(),
        },
        "runs": [asdict(o) for o in outcomes],
    }  # fmt: skip


def _cpu() -> str:
    for text in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if text.startswith("model name"):
            return text.partition(":")[2].strip()
    return platform.machine()


def _seeds(text: str) -> list[int]:
    """`3`, `0..299` or `1,5,9..12`."""
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("..")
        found += range(int(first), int(last or first) + 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.chaos.run", description=__doc__)
    parser.add_argument("--seeds", type=_seeds, default=_seeds("0..19"))
    parser.add_argument("--jobs", type=int, default=1, help="daemons at the same time")
    parser.add_argument("--json", type=Path, help="where the outcomes go")
    a = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))  # nothing is left
    if a.jobs == 1:
        outcomes = run_seeds(a.seeds)
    else:
        with ProcessPoolExecutor(a.jobs) as pool:
            parts = pool.map(run_seeds, [a.seeds[i :: a.jobs] for i in range(a.jobs)])
            outcomes = sorted((o for part in parts for o in part), key=lambda o: o.seed)
    if a.json is not None:
        a.json.write_text(json.dumps(summary(outcomes), indent=1) + "\n", encoding="utf-8")
    bad = [o.seed for o in outcomes if o.violations]
    print(f"{len(outcomes)} seeds, {len(bad)} with violations{': ' if bad else ''}{bad or ''}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
