"""What happens to the micro-scheduler beside the conductor's messages."""

from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Reason


@dataclass(frozen=True, slots=True)
class RowEnd:
    """A row that finished in a step; `count` is the output position reached, base included.

    `closed`: its last frame bore FLAG_CLOSES. `next`: the walk that the model asks for, or None.
    """

    reason: Reason
    count: int
    closed: bool = False
    next: str | None = None

    def extra(self) -> dict[str, Any]:
        """What the report of this end carries beside its columns."""
        told: dict[str, Any] = {"reason": int(self.reason), "closed": self.closed}
        return told if self.next is None else {**told, "next": self.next}


@dataclass(frozen=True, slots=True)
class Refusal:
    """Admission refused the whole step for want of space; `error` (wire form) has the numbers."""

    error: dict[str, Any]


@dataclass(frozen=True, slots=True)
class StepDone:
    """A submitted step is over and its frames are sent.

    `ends` finished; `failed` failed alone, `never` can never run here (row → wire error);
    `returned` did not run in it and are to be tried again; after a refusal all others are. `error`
    fails all that is not listed.
    """

    step: int
    ends: dict[int, RowEnd] = field(default_factory=dict[int, RowEnd])
    failed: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    never: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    returned: frozenset[int] = frozenset()
    refusal: Refusal | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EmptyClosed:
    """The empty closing frame that `CloseEmpty` asked for was sent; or `error` came instead."""

    row: int
    end: RowEnd | None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class OwnerStalled:
    """The backlog to this owner is over its limit (or no longer)."""

    owner: int
    stalled: bool


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """This owner takes nothing any more: its rows fail with `error` (wire form)."""

    owner: int
    error: dict[str, Any]
