"""Identities on the wire (docs/wire.md, "Identity").

Every id that a process mints is scoped by that process's `life`, so two incarnations of one
process never share an id.
"""

import itertools
import secrets


def new_life() -> int:
    """A process incarnation: a random non-zero u64, minted once per process start."""
    return secrets.randbits(64) or 1


class Counter:
    """Mints 1, 2, 3, … and never a number twice; `prefix` fills the upper 32 bits."""

    def __init__(self, prefix: int = 0) -> None:
        self._prefix = (prefix & 0xFFFF_FFFF) << 32
        self._numbers = itertools.count(1)

    def next(self) -> int:
        return self._prefix | next(self._numbers)


def row_counter(conductor_life: int) -> Counter:
    """Row ids: 32 bits of the conductor's life, then a counter. Never renamed, never reused."""
    return Counter(conductor_life)
