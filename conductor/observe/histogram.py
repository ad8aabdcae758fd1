"""Durations by size, in fixed buckets: cheap to add to, small to publish."""

from bisect import bisect_left

from protocol.stats import HistogramStats

BOUNDS_MS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 100.0, 1000.0)


class Histogram:
    def __init__(self, bounds_ms: tuple[float, ...] = BOUNDS_MS) -> None:
        self._bounds = bounds_ms
        self._counts = [0] * (len(bounds_ms) + 1)
        self._total = 0.0
        self._max = 0.0

    def add(self, ms: float) -> None:
        self._counts[bisect_left(self._bounds, ms)] += 1
        self._total += ms
        self._max = max(self._max, ms)

    def statistics(self) -> HistogramStats:
        return {
            "bounds_ms": list(self._bounds),
            "counts": list(self._counts),
            "total_ms": round(self._total, 3),
            "max_ms": round(self._max, 3),
        }
