"""What the postprocess thread knows of rows, in columns, so that a step's stops cost no loop."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.graph import GraphSpec
from protocol.messages import ROW_MAY_CLOSE, Row

NO_TOKEN = -1
_FIRST_SLOTS = 64


@dataclass(slots=True, eq=False)
class RowStream:
    """Where a row's tokens go, and how its end is told. `start`: position of its first own token.

    `final_batch`: the one-shot batch that ends the path; 0 where a standing batch does.
    """

    row: int
    owner: int
    stream: int
    attempt: int
    model: str
    start: int
    ends_at: int
    may_close: bool
    final_batch: int
    stops: frozenset[int]

    @classmethod
    def of(cls, row: Row, model: str, graph: GraphSpec, stops: frozenset[int]) -> "RowStream":
        start = (row.base[0] if row.base else 0) + len(row.handed)
        batch, tokens = row.path[-1]
        return cls(
            row=row.row,
            owner=row.owner,
            stream=row.stream,
            attempt=row.attempt,
            model=model,
            start=start,
            ends_at=start + row.max_steps,
            may_close=bool(row.flags & ROW_MAY_CLOSE) and len(graph.outputs) == 1,
            final_batch=batch if tokens else 0,
            stops=stops,
        )


class RowTable:
    """Slots of rows; `position` is the index of a row's next output, `over` that it has ended."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._free = list(range(_FIRST_SLOTS - 1, -1, -1))
        self._streams: list[RowStream | None] = [None] * _FIRST_SLOTS
        self.owner: NDArray[np.uint64] = np.zeros(_FIRST_SLOTS, np.uint64)
        self.stream: NDArray[np.uint64] = np.zeros(_FIRST_SLOTS, np.uint64)
        self.attempt: NDArray[np.uint16] = np.zeros(_FIRST_SLOTS, np.uint16)
        self.position: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.ends_at: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.final_batch: NDArray[np.int64] = np.zeros(_FIRST_SLOTS, np.int64)
        self.over: NDArray[np.bool_] = np.zeros(_FIRST_SLOTS, np.bool_)
        self.stops: NDArray[np.int64] = np.full((_FIRST_SLOTS, 1), NO_TOKEN, np.int64)

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, row: int) -> bool:
        return row in self._slots

    def add(self, stream: RowStream) -> None:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[stream.row] = slot
        self._streams[slot] = stream
        self.owner[slot] = stream.owner
        self.stream[slot] = stream.stream
        self.attempt[slot] = stream.attempt
        self.position[slot] = stream.start
        self.ends_at[slot] = stream.ends_at
        self.final_batch[slot] = stream.final_batch
        self.over[slot] = False
        if len(stream.stops) > self.stops.shape[1]:
            wider = np.full((len(self.stops), len(stream.stops)), NO_TOKEN, np.int64)
            wider[:, : self.stops.shape[1]] = self.stops
            self.stops = wider
        self.stops[slot] = NO_TOKEN
        self.stops[slot, : len(stream.stops)] = list(stream.stops)

    def remove(self, row: int) -> None:
        """Idempotent."""
        slot = self._slots.pop(row, None)
        if slot is not None:
            self._streams[slot] = None
            self._free.append(slot)

    def get(self, row: int) -> RowStream | None:
        slot = self._slots.get(row)
        return self._streams[slot] if slot is not None else None

    def at(self, slot: int) -> RowStream | None:
        return self._streams[slot]

    def position_of(self, row: int) -> int:
        return int(self.position[self._slots[row]])

    def has_ended(self, row: int) -> bool:
        return bool(self.over[self._slots[row]])

    def slots(self, rows: Sequence[int]) -> NDArray[np.intp]:
        return np.fromiter((self._slots[r] for r in rows), np.intp, len(rows))

    def end(self, row: int) -> None:
        """Whatever still comes of this row is discarded."""
        slot = self._slots.get(row)
        if slot is not None:
            self.over[slot] = True

    def _grow(self) -> None:
        n = len(self._streams)
        self._free.extend(range(2 * n - 1, n - 1, -1))
        self._streams.extend([None] * n)

        def longer(a: NDArray[Any]) -> NDArray[Any]:
            return np.concatenate([a, np.zeros_like(a)])

        self.owner = longer(self.owner)
        self.stream = longer(self.stream)
        self.attempt = longer(self.attempt)
        self.position = longer(self.position)
        self.ends_at = longer(self.ends_at)
        self.final_batch = longer(self.final_batch)
        self.over = longer(self.over)
        self.stops = np.concatenate([self.stops, np.full_like(self.stops, NO_TOKEN)])
