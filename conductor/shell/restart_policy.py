"""When a child that ended is started again, and when supervision gives up. Pure.

Every end counts, whoever caused it: a worker that the kernel's OOM killer ends again and again must
be bounded too. Restarts older than the window are forgotten, so a child that ran well for long
starts again with the first, short delay.
"""

from collections import deque
from dataclasses import dataclass

from protocol.config import SupervisionConfig


@dataclass(frozen=True, slots=True)
class Restart:
    after: float  # seconds


@dataclass(frozen=True, slots=True)
class GiveUp:
    why: str


class RestartPolicy:
    """One child's budget: `max_restarts` in `restart_window_s`, each delay double the last."""

    def __init__(self, config: SupervisionConfig) -> None:
        self._config = config
        self._restarts: deque[float] = deque()

    def exited(self, now: float) -> Restart | GiveUp:
        """The child ended at `now` (monotonic seconds)."""
        c = self._config
        while self._restarts and self._restarts[0] <= now - c.restart_window_s:
            self._restarts.popleft()
        done = len(self._restarts)
        if done >= c.max_restarts:
            return GiveUp(f"it ended again after {done} restarts within {c.restart_window_s} s")
        self._restarts.append(now)
        # the exponent is capped: 2**done of a large budget would be a needless bignum
        delay_ms = min(c.backoff_max_ms, c.backoff_ms * 2 ** min(done, 32))
        return Restart(delay_ms / 1000)
