"""The life of a request in the conductor: docs/wire.md, "Request (conductor)".

The wire's `settling` is two states here, because only one of them can still be rebased (rule 14):
`SETTLING` after a success whose last frames may be lost with their worker, `ENDING` after a failing
`End`. `asking` belongs to models whose walks follow one another by `next_walk`; with walks chained
by `then`, the finishing worker has always answered.
"""

from enum import Enum, auto


class RequestState(Enum):
    QUEUED = auto()  # waits for a place: in the queue, or in a trial group
    ACTIVE = auto()  # has a row on a worker
    REBASING = auto()  # the attempt was raised; the owner's History is awaited
    SETTLING = auto()  # done; Closed is awaited
    ENDING = auto()  # a failing End was proposed; Closed is awaited
    GONE = auto()


class RequestEvent(Enum):
    PLACED = auto()
    DONE = auto()
    REBASE = auto()
    HISTORY = auto()
    FAIL = auto()  # deadline, failure, refusal, quarantine, drain: everything that proposes an end
    CLOSED = auto()  # by its owner, or with its owner


_S, _E = RequestState, RequestEvent

TABLE: dict[tuple[RequestState, RequestEvent], RequestState] = {
    (_S.QUEUED, _E.PLACED): _S.ACTIVE,
    (_S.QUEUED, _E.REBASE): _S.REBASING,  # submitted again after a session ended (rule 20)
    (_S.QUEUED, _E.FAIL): _S.ENDING,
    (_S.QUEUED, _E.CLOSED): _S.GONE,
    (_S.ACTIVE, _E.DONE): _S.SETTLING,
    (_S.ACTIVE, _E.REBASE): _S.REBASING,
    (_S.ACTIVE, _E.FAIL): _S.ENDING,
    (_S.ACTIVE, _E.CLOSED): _S.GONE,
    (_S.REBASING, _E.HISTORY): _S.QUEUED,
    (_S.REBASING, _E.FAIL): _S.ENDING,
    (_S.REBASING, _E.CLOSED): _S.GONE,
    (_S.SETTLING, _E.REBASE): _S.REBASING,
    (_S.SETTLING, _E.FAIL): _S.ENDING,
    (_S.SETTLING, _E.CLOSED): _S.GONE,
    (_S.ENDING, _E.CLOSED): _S.GONE,
}
