"""What a worker's threads ask of each other, as values.

Each queue is first in, first out:

GpuOrder: main → gpu
PostOrder: main, gpu → postprocess
Post: postprocess → main
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from protocol.messages import Reason, Row
from worker.engine.executing_batch import ExecutingBatch
from worker.micro_scheduler.events import EmptyClosed, OwnerGone, OwnerStalled, StepDone

# ---- to the GPU thread


@dataclass(frozen=True, slots=True)
class Step:
    """Prepare this step, launch it, and hand it to the postprocess thread."""

    batch: ExecutingBatch


@dataclass(frozen=True, slots=True)
class Ingest:
    """The request will use this node: make room for its state."""

    node: str
    request_id: int
    params: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Unblock:
    """Steps may contain these rows again: what blocked them is settled."""

    request_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Remove:
    """Free all that the request has: no step contains it any more."""

    request_id: int


@dataclass(frozen=True, slots=True)
class Call:
    """Run something on this thread: loading and warm-up, whose modes and threads are per thread."""

    function: Callable[[], Any]
    result: Future[Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """What was ordered before is still done; what comes after is never looked at."""


GpuOrder = Step | Ingest | Unblock | Remove | Call | Stop


# ---- to the postprocess thread


@dataclass(frozen=True, slots=True)
class Attach:
    """This row will be in steps: where its tokens go, and what ends it."""

    row: Row
    model: str


@dataclass(frozen=True, slots=True)
class Detach:
    """No step contains the row any more."""

    row: int


@dataclass(frozen=True, slots=True)
class CloseEmpty:
    """Rule 11: one empty closing frame for this row."""

    row: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class OwnerUp:
    """Connect to this owner; again, if it moved."""

    owner: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class OwnerDown:
    """Forget this owner and what is kept for it."""

    owner: int


@dataclass(frozen=True, slots=True)
class Halt:
    """Stop; frames that are not acknowledged are given up."""


@dataclass(frozen=True, slots=True)
class Settled:
    """To main: the owner acknowledged every frame of these ended rows, each (row, count)."""

    rows: tuple[tuple[int, int], ...]


PostOrder = ExecutingBatch | Attach | Detach | CloseEmpty | OwnerUp | OwnerDown | Halt
Post = StepDone | EmptyClosed | OwnerStalled | OwnerGone | Settled
