"""When requests run out of time. Costs what is due, not what exists."""

from conductor.core.lazy_heap import LazyHeap
from conductor.core.records import Request


class Deadlines:
    """At most one deadline per request, in monotonic seconds."""

    def __init__(self) -> None:
        self._heap: LazyHeap[Request] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, request: Request) -> bool:
        return request in self._heap

    def set(self, request: Request, at: float) -> None:
        self._heap.push(at, request)

    def clear(self, request: Request) -> None:
        self._heap.discard(request)

    def next(self) -> float | None:
        first = self._heap.first()
        return None if first is None else first[0]

    def take_due(self, now: float) -> list[Request]:
        """Those whose time has come, earliest first; they have no deadline any more."""
        due: list[Request] = []
        while (first := self._heap.first()) is not None and first[0] <= now:
            due.append(first[1])
            self._heap.discard(first[1])
        return due
