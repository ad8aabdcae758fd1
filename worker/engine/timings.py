"""Histograms of where steps spend their time (E42)."""

from bisect import bisect_left
from dataclasses import fields
from typing import Any

from worker.engine.executing_batch import ExecTimings

BOUNDS = tuple(1e-6 * 2**i for i in range(24))
"""Upper bounds in seconds, 1 µs to 8.4 s; one more bucket takes the rest."""

STAGES = tuple(f.name for f in fields(ExecTimings))


class StepHistograms:
    """One histogram a stage. One thread observes; others may read a snapshot at any time."""

    def __init__(self) -> None:
        self.steps = 0
        self._counts = {s: [0] * (len(BOUNDS) + 1) for s in STAGES}
        self._sums = dict.fromkeys(STAGES, 0.0)

    def observe(self, timings: ExecTimings) -> None:
        self.steps += 1
        for stage in STAGES:
            seconds: float = getattr(timings, stage)
            self._counts[stage][bisect_left(BOUNDS, seconds)] += 1
            self._sums[stage] += seconds

    def snapshot(self) -> dict[str, Any]:
        """`{"bounds": […], stage: {"counts": […], "sum": seconds}}`."""
        stages = {s: {"counts": list(self._counts[s]), "sum": self._sums[s]} for s in STAGES}
        return {"bounds": list(BOUNDS), **stages}
