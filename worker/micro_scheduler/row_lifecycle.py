"""The lifecycle of a row on this worker: every transition there is.

A row waits for its stage, runs in it (a standing batch's row keeps running), may be held and
resumed, and ends exactly once. `LEAVE` finds it with nothing in flight, `LEAVE_LATER` with steps
that were launched and whose frames are still to be sent.
"""

from enum import Enum, auto


class RowState(Enum):
    WAITING = auto()
    RUNNING = auto()
    HELD = auto()
    LEAVING = auto()
    ENDED = auto()


class RowEvent(Enum):
    STEP = auto()  # a step that contains it was submitted
    MOVE = auto()  # the step that completes its stage was submitted
    HOLD = auto()
    RESUME = auto()
    RETURN = auto()  # a submitted step came back without having run it
    LEAVE = auto()
    LEAVE_LATER = auto()
    LEFT = auto()
    FINISH = auto()
    FAIL = auto()
    REFUSE = auto()
    PREEMPT = auto()


_S, _E = RowState, RowEvent

_LIVE: dict[tuple[RowState, RowEvent], RowState] = {
    (_S.WAITING, _E.STEP): _S.RUNNING,
    (_S.RUNNING, _E.STEP): _S.RUNNING,
    (_S.HELD, _E.STEP): _S.HELD,  # a retry: it resumes when the step was admitted
    (_S.RUNNING, _E.MOVE): _S.WAITING,
    (_S.HELD, _E.MOVE): _S.HELD,
    (_S.WAITING, _E.HOLD): _S.HELD,
    (_S.RUNNING, _E.HOLD): _S.HELD,
    (_S.HELD, _E.RESUME): _S.WAITING,
    (_S.WAITING, _E.RETURN): _S.WAITING,
    (_S.RUNNING, _E.RETURN): _S.WAITING,
    (_S.HELD, _E.RETURN): _S.HELD,
    (_S.LEAVING, _E.RETURN): _S.LEAVING,
    (_S.WAITING, _E.LEAVE): _S.ENDED,
    (_S.RUNNING, _E.LEAVE): _S.ENDED,
    (_S.HELD, _E.LEAVE): _S.ENDED,
    (_S.WAITING, _E.LEAVE_LATER): _S.LEAVING,
    (_S.RUNNING, _E.LEAVE_LATER): _S.LEAVING,
    (_S.HELD, _E.LEAVE_LATER): _S.LEAVING,
    (_S.LEAVING, _E.LEAVE_LATER): _S.LEAVING,
    (_S.LEAVING, _E.LEFT): _S.ENDED,
    (_S.ENDED, _E.LEAVE): _S.ENDED,  # rule 2: on an ended row it is ignored
    (_S.ENDED, _E.LEAVE_LATER): _S.ENDED,
}

#: (state, event) → state; a missing pair raises `IllegalTransition`.
TABLE: dict[tuple[RowState, RowEvent], RowState] = _LIVE | {
    (state, event): _S.ENDED
    for state in (_S.WAITING, _S.RUNNING, _S.HELD, _S.LEAVING)
    for event in (_E.FINISH, _E.FAIL, _E.REFUSE, _E.PREEMPT)
}
