"""The life of a worker in the conductor: docs/wire.md, "worker (conductor)"."""

from enum import Enum, auto


class WorkerState(Enum):
    STARTING = auto()
    READY = auto()
    DRAINING = auto()  # gets no placements
    GONE = auto()  # said Bye
    LOST = auto()  # its messages are dropped, its life is never taken back


class WorkerEvent(Enum):
    HELLO = auto()  # a worker says it only when warmed up; again for a new session
    LEAVING = auto()
    BYE = auto()
    LOST = auto()


_S, _E = WorkerState, WorkerEvent

TABLE: dict[tuple[WorkerState, WorkerEvent], WorkerState] = {
    (_S.STARTING, _E.HELLO): _S.READY,
    (_S.STARTING, _E.LOST): _S.LOST,
    (_S.READY, _E.HELLO): _S.READY,
    (_S.READY, _E.LEAVING): _S.DRAINING,
    (_S.READY, _E.BYE): _S.GONE,
    (_S.READY, _E.LOST): _S.LOST,
    (_S.DRAINING, _E.HELLO): _S.DRAINING,
    (_S.DRAINING, _E.LEAVING): _S.DRAINING,
    (_S.DRAINING, _E.BYE): _S.GONE,
    (_S.DRAINING, _E.LOST): _S.LOST,
}
