"""What happens to the micro-scheduler beside the conductor's messages."""

from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Reason


@dataclass(frozen=True, slots=True)
class RowEnd:
    """A row that finished in a step; `count` is the output position reached, base included."""

    reason: Reason
    count: int
    facts: dict[str, Any] = field(default_factory=dict[str, Any])
    next: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """Admission refused the whole step.

    `terminal`: it never could run; `row`: whom that concerns (None: all). `error` is in wire form.
    """

    terminal: bool
    error: dict[str, Any]
    row: int | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """A submitted step is over and its frames are sent.

    `ends` finished, `failed` failed alone (row → wire error), `returned` did not run in it and
    are to be tried again; after a refusal all rows are. `error` fails all that is not listed.
    """

    step: int
    ends: dict[int, RowEnd] = field(default_factory=dict[int, RowEnd])
    failed: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])
    returned: frozenset[int] = frozenset()
    refusal: Refusal | None = None
    error: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class EmptyClosed:
    """The empty closing frame that `CloseEmpty` asked for was sent."""

    row: int
    end: RowEnd


@dataclass(frozen=True, slots=True)
class OwnerStalled:
    """The backlog to this owner is over its limit (or no longer)."""

    owner: int
    stalled: bool


@dataclass(frozen=True, slots=True)
class OwnerGone:
    """This owner takes nothing any more. Its rows leave, or fail with `error` where there is one."""

    owner: int
    error: dict[str, Any] | None = None
