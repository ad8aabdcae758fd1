"""The settings that must not change a token (E35), and rows that cover every pair of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

DIMENSIONS: dict[str, Sequence[object]] = {
    "depth": (1, 2, 3, 4),
    "chunk": (0, 16, 5),  # tokens of a prefill batch; 0: the whole prompt
    "composition": ("together", "alone", "two batches"),
    "joins": ("at once", "staggered", "reversed"),
    "place": ("cpu", "free", "compute_behind", "readback_behind", "one_by_one"),
    "retries": (False, True),  # a batched forward raises once and is tried again in halves
}


@dataclass(frozen=True)
class Setting:
    """`place`: "cpu", or the rule under which the cpu-async device runs."""

    depth: int
    chunk: int
    composition: str
    joins: str
    place: str
    retries: bool

    def __str__(self) -> str:
        size = self.chunk or "whole"
        halves = "-halves" if self.retries else ""
        return f"{self.depth}-{size}-{self.composition}-{self.joins}-{self.place}{halves}".replace(
            " ", "_"
        )

    def pairs(self) -> set[tuple[object, ...]]:
        values = [(d, getattr(self, d)) for d in DIMENSIONS]
        return {(*a, *b) for a, b in itertools.combinations(values, 2)}


def every_pair() -> set[tuple[object, ...]]:
    found: set[tuple[object, ...]] = set()
    for (a, values), (b, others) in itertools.combinations(DIMENSIONS.items(), 2):
        found |= {(a, x, b, y) for x in values for y in others}
    return found


def covering() -> list[Setting]:
    """Few settings in which every two values of different dimensions meet; always the same ones."""
    candidates = [Setting(*values) for values in itertools.product(*DIMENSIONS.values())]  # type: ignore[arg-type]
    missing = every_pair()
    chosen: list[Setting] = []
    while missing:
        best = max(candidates, key=lambda s: len(s.pairs() & missing))
        chosen.append(best)
        missing -= best.pairs()
    return chosen
