"""What the micro-scheduler decides, as values. The main thread performs them in order."""

from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Kind, Reason, Row


@dataclass(frozen=True, slots=True)
class Attach:
    """The postprocess thread learns this row before any step contains it."""

    row: Row
    model: str


@dataclass(frozen=True, slots=True)
class Ingest:
    """The engine learns this row on `node`, before the first step there."""

    row: int
    node: str


@dataclass(slots=True)
class PlannedStep:
    """One step of one batch, in columns over its rows.

    `spans[i]` is the half-open range of the row's input tokens that this step consumes, (0, 0)
    where the input feeds back on the device. `positions`: tokens in the row's state before the
    step; `outputs`: index of its next output; `samples`: whether the step yields one.
    """

    step: int
    batch: int
    node: str
    walk: str
    rows: list[int] = field(default_factory=list[int])
    spans: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    positions: list[int] = field(default_factory=list[int])
    outputs: list[int] = field(default_factory=list[int])
    samples: list[bool] = field(default_factory=list[bool])


@dataclass(frozen=True, slots=True)
class Unblock:
    """Rows that a step came back without: the GPU thread may run them again."""

    rows: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CloseEmpty:
    """Rule 11: this row's history already meets its stop. One empty closing frame, no step."""

    row: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Remove:
    """The row ended and no launched step contains it any more: free all it has."""

    row: int


@dataclass(frozen=True, slots=True)
class Say:
    """One line of a `Report`."""

    row: int
    kind: Kind
    value: int
    extra: dict[str, Any] | None = None


Decision = Attach | Ingest | PlannedStep | Unblock | CloseEmpty | Remove | Say
