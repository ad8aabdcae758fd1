"""Time as a value that is passed in.

All durations and deadlines use `monotonic`; `wall` only stamps what people read, so a jump of the
wall clock changes nothing else (promise P23).
"""

import time
from typing import Protocol


class Clock(Protocol):
    def monotonic(self) -> float:
        """Seconds since an arbitrary start; never goes back."""
        ...

    def wall(self) -> float:
        """Seconds since the Unix epoch, for timestamps only."""
        ...


class SystemClock:
    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()
