"""A heap from which any item can be taken out at amortised logarithmic cost.

Taking out leaves a hole; holes are swept when they are the majority, so that neither time nor
memory grows with what has already gone.
"""

import heapq
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class LazyHeap(Generic[T]):
    """Items by ascending key; items with equal keys in the order they came."""

    __slots__ = ("_count", "_entries", "_heap")

    def __init__(self) -> None:
        self._heap: list[list[Any]] = []  # [key, number, item or None for a hole]
        self._entries: dict[T, list[Any]] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, item: T) -> bool:
        return item in self._entries

    def items(self) -> list[T]:
        """All items, in no particular order; for checks and for ending everything."""
        return list(self._entries)

    def push(self, key: Any, item: T) -> None:
        """Raises `ValueError` for an item that is already in."""
        if item in self._entries:
            raise ValueError("the item is already in the heap")
        self._count += 1
        entry = [key, self._count, item]
        self._entries[item] = entry
        heapq.heappush(self._heap, entry)

    def discard(self, item: T) -> bool:
        """Whether the item was in."""
        entry = self._entries.pop(item, None)
        if entry is None:
            return False
        entry[2] = None
        if len(self._heap) > 2 * len(self._entries) + 32:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        return True

    def first(self) -> tuple[Any, T] | None:
        """The smallest key and its item, which stays in."""
        while self._heap and self._heap[0][2] is None:
            heapq.heappop(self._heap)
        return (self._heap[0][0], self._heap[0][2]) if self._heap else None
