"""How long a step may be expected to take: what tells a busy worker from a hung one (promise P6).

A conductor calls a step hung when it lasts five times what its worker announces for it. A prefill
of two thousand tokens takes a hundred times what a decode step does, so an average over all steps
would get honest workers killed: each (node, walk) has its own cost per token. On a CPU other
processes may take the cores away, by any factor, so the announcement has a floor.
"""

from collections import deque
from dataclasses import dataclass

MEMORY = 0.9  # how slowly a cost decays; a dearer step counts at once
HANG_FACTOR = 5  # of the conductor: a step is hung at this many times its announced time


@dataclass(slots=True)
class _Step:
    step: int
    kind: tuple[str, str]
    tokens: int
    submitted_at: float


class StepPace:
    """`hang_s`: no step counts as hung before it has lasted this long."""

    def __init__(self, hang_s: float) -> None:
        self._floor = hang_s / HANG_FACTOR
        self._cost: dict[tuple[str, str], float] = {}  # seconds a token
        self._flying: deque[_Step] = deque()
        self._done_at = 0.0

    def submitted(self, step: int, node: str, walk: str, tokens: int, now: float) -> None:
        self._flying.append(_Step(step, (node, walk), max(1, tokens), now))

    def done(self, step: int, now: float) -> None:
        """Steps end in the order in which they were submitted."""
        head = self._flying.popleft()
        assert head.step == step, f"step {step} ended, {head.step} was the oldest"
        cost = (now - max(head.submitted_at, self._done_at)) / head.tokens
        before = self._cost.get(head.kind, 0.0)
        self._cost[head.kind] = max(cost, MEMORY * before + (1 - MEMORY) * cost)
        self._done_at = now

    def age(self, now: float) -> float:
        """Seconds that the oldest step has been running; 0 when none is."""
        if not self._flying:
            return 0.0
        return now - max(self._flying[0].submitted_at, self._done_at)

    def expected(self) -> float:
        """Seconds that the oldest step may be expected to take."""
        if not self._flying:
            return self._floor
        head = self._flying[0]
        return max(self._floor, self._cost.get(head.kind, 0.0) * head.tokens)
