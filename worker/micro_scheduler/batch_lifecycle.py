"""The lifecycle of a batch on this worker: every transition there is.

A one-shot batch is planned, then done when each of its rows has moved on or ended. A standing batch
is open, parked while it stands at its limit, and closed once, when it is empty.
"""

from enum import Enum, auto


class BatchState(Enum):
    PLANNED = auto()
    DONE = auto()
    OPEN = auto()
    PARKED = auto()
    CLOSED = auto()


class BatchEvent(Enum):
    STEP = auto()
    EMPTY = auto()  # a one-shot batch has no row left
    JOIN = auto()  # rows come to a standing batch
    PARK = auto()
    UNPARK = auto()
    CLOSE = auto()
    CLOSE_BUSY = auto()  # `Close` although it has rows: never legal
    OPEN_AGAIN = auto()  # a known batch announced anew: never legal


_S, _E = BatchState, BatchEvent

#: (state, event) → state; a missing pair raises `IllegalTransition`.
TABLE: dict[tuple[BatchState, BatchEvent], BatchState] = {
    (_S.PLANNED, _E.STEP): _S.PLANNED,
    (_S.PLANNED, _E.EMPTY): _S.DONE,
    (_S.OPEN, _E.STEP): _S.OPEN,
    (_S.OPEN, _E.JOIN): _S.OPEN,
    (_S.PARKED, _E.JOIN): _S.PARKED,
    (_S.OPEN, _E.PARK): _S.PARKED,
    (_S.PARKED, _E.PARK): _S.PARKED,
    (_S.OPEN, _E.UNPARK): _S.OPEN,
    (_S.PARKED, _E.UNPARK): _S.OPEN,
    (_S.OPEN, _E.CLOSE): _S.CLOSED,
    (_S.PARKED, _E.CLOSE): _S.CLOSED,
}
