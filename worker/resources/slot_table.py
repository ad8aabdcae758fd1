"""Slots for what a resource keeps per request: a dense index, and numpy columns over it.

A step's rows are looked up as one index array, which is kept while the step's segments are the
same object and nobody came or went, so that a steady batch pays nothing per row.
"""

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from worker.api.inputs import Segment

K = TypeVar("K", bound=Hashable)
Ints = npt.NDArray[np.int64]


class SlotTable(Generic[K]):
    """Key → slot, the last freed first; columns grow by doubling.

    `column(name)` must be asked for again after an `acquire`, which may have replaced the array.
    """

    def __init__(self, capacity: int = 64) -> None:
        self.capacity = capacity
        self._slots: dict[K, int] = {}
        self._free = list(range(capacity - 1, -1, -1))
        self._columns: dict[str, npt.NDArray[Any]] = {}

    def add_column(self, name: str, dtype: npt.DTypeLike, width: int | None = None) -> None:
        shape = (self.capacity,) if width is None else (self.capacity, width)
        self._columns[name] = np.zeros(shape, dtype)

    def column(self, name: str) -> npt.NDArray[Any]:
        return self._columns[name]

    def widen(self, name: str, width: int) -> None:
        """Give a two-dimensional column at least `width` entries a slot; new ones are 0."""
        old = self._columns[name]
        if width > old.shape[1]:
            new = np.zeros((old.shape[0], max(width, 2 * old.shape[1])), old.dtype)
            new[:, : old.shape[1]] = old
            self._columns[name] = new

    def acquire(self, key: K) -> int:
        """The key's slot; a new one has zeros in every column."""
        slot = self._slots.get(key)
        if slot is None:
            if not self._free:
                self._grow()
            slot = self._slots[key] = self._free.pop()
            for column in self._columns.values():
                column[slot] = 0
        return slot

    def release(self, key: K) -> int | None:
        slot = self._slots.pop(key, None)
        if slot is not None:
            self._free.append(slot)
        return slot

    def get(self, key: K) -> int | None:
        return self._slots.get(key)

    def index(self, keys: Iterable[K]) -> Ints:
        """Slots of `keys`; KeyError names one that has none."""
        slots = self._slots
        return np.array([slots[k] for k in keys], np.int64)

    def used(self) -> Ints:
        return np.array(list(self._slots.values()), np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: K) -> bool:
        return key in self._slots

    def items(self) -> Iterable[tuple[K, int]]:
        return self._slots.items()

    def _grow(self) -> None:
        old, self.capacity = self.capacity, 2 * self.capacity
        self._free.extend(range(self.capacity - 1, old - 1, -1))
        for name, column in self._columns.items():
            self._columns[name] = np.concatenate([column, np.zeros_like(column)])


class Rows:
    """A step's segments as arrays, in row order. `decode`: every span is 1."""

    __slots__ = (
        "decode",
        "request_ids",
        "segments",
        "slots",
        "spans",
        "spans_list",
        "tokens",
        "version",
    )

    def __init__(self, segments: Sequence[Segment], slots: Ints, version: int) -> None:
        self.segments = segments
        self.slots = slots
        self.request_ids = [s.request_id for s in segments]
        self.spans_list = [s.span for s in segments]
        self.spans: Ints = np.array(self.spans_list, np.int64)
        self.tokens = int(self.spans.sum())
        self.decode = self.tokens == len(segments) and all(s == 1 for s in self.spans_list)
        self.version = version
