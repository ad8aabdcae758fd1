"""What the core remembers of a request, of its row on a worker, and of batches: data, no decisions.

Records compare by identity: each is the one account of its object.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from conductor.core import request_lifecycle
from conductor.core.request_lifecycle import RequestEvent, RequestState
from protocol.lifecycle import Lifecycle
from protocol.messages import Reason

if TYPE_CHECKING:
    from conductor.core.registry import Owner, Worker


@dataclass(frozen=True, slots=True)
class ProposedEnd:
    """An `End` that the owner has been told, kept to be told again after a new session."""

    reason: Reason
    counts: list[int]
    detail: dict[str, Any]


@dataclass(slots=True, eq=False)
class Request:
    """One stream of one owner, from `Submit` to `Closed`.

    `prompt` is u32 little-endian; `max_tokens` is resolved; `params` holds it and a seed.
    `sequence` is the order of arrival and stays with a request through its replays. `row` is the
    row of the current attempt, live or ended.
    """

    owner: Owner
    stream: int
    attempt: int
    model: str
    prompt: bytes
    params: dict[str, Any]
    max_tokens: int
    priority: int
    tenant: str
    replay: str
    sequence: int
    history: array[int] = field(default_factory=lambda: array("I"))
    counts: list[int] = field(default_factory=list[int])  # of the other channels, as History told
    row: PlacedRow | None = None
    trial: Trial | None = None
    end: ProposedEnd | None = None
    replays: int = 0
    preemptions: int = 0
    lifecycle: Lifecycle[RequestState, RequestEvent] = field(init=False)

    def __post_init__(self) -> None:
        what = f"request {self.stream:#x} of {self.owner.name}"
        self.lifecycle = Lifecycle(what, RequestState.QUEUED, request_lifecycle.TABLE)

    @property
    def state(self) -> RequestState:
        return self.lifecycle.state

    @property
    def prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def base(self) -> int:
        """Output position at which a row placed now starts (rule 15)."""
        return len(self.history) if self.replay == "history" else 0

    @property
    def input_tokens(self) -> int:
        """Tokens that a row placed now computes before its first output."""
        return self.prompt_tokens + self.base

    @property
    def total_tokens(self) -> int:
        """Most tokens it can ever hold in KV, in any attempt."""
        return self.prompt_tokens + self.max_tokens


@dataclass(slots=True, eq=False)
class PlacedRow:
    """One stay of one attempt on one worker, through all stages of its path.

    It is live, and holds its pages and its seat, until its end is reported or its worker is lost.
    """

    id: int
    request: Request
    attempt: int
    worker: Worker
    model: str
    pages: int
    base: int
    path: list[tuple[OneShotBatch | StandingBatch, int]]  # (batch, input tokens)
    stage: int = 0
    position: int = 0
    sent: bool = False  # the worker has been told of it
    held: bool = False
    leaving: bool = False
    ended: bool = False


@dataclass(slots=True, eq=False)
class OneShotBatch:
    """A batch that runs once and comes whole.

    `rows` maps a row to its tokens here; once sent, it keeps those neither moved, held nor ended,
    and the batch counts as ahead while there are any (rule 5).
    """

    id: int
    model: str
    node: str
    walk: str
    priority: int
    max_rows: int
    max_tokens: int
    rows: dict[PlacedRow, int] = field(default_factory=dict[PlacedRow, int])
    tokens: int = 0
    sent: bool = False
    returned: bool = False  # a held row resumed and brought it back: it may be a third ahead

    def has_room(self, tokens: int) -> bool:
        return (
            not self.sent
            and self.tokens + tokens <= self.max_tokens
            and len(self.rows) < self.max_rows
        )


@dataclass(slots=True, eq=False)
class StandingBatch:
    """A loop's batch: opened once, then rows come and go. `rows` are those not yet ended."""

    id: int
    model: str
    node: str
    walk: str
    priority: int
    max_rows: int
    rows: set[PlacedRow] = field(default_factory=set[PlacedRow])
    emptied_at: float = 0.0


@dataclass(slots=True, eq=False)
class Trial:
    """Suspects of one crash that replay together, with nothing else stepping beside them (rule 16).

    `passed`: members that came 4 tokens past their history, or ended without a crash.
    """

    model: str
    members: dict[Request, None]
    since: float
    worker: Worker | None = None
    passed: set[Request] = field(default_factory=set[Request])
