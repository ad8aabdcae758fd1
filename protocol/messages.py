"""Every message of the wire protocol, version 1 (docs/wire.md).

A message is a frozen dataclass with a numeric `TAG`. Its fields travel in order as one msgpack
array behind a header. A field made by `column(...)` is numeric and travels as little-endian bytes;
a column that holds only its default travels as nil. All durations are milliseconds, all counts
tokens unless a field says otherwise.
"""

from array import array
from dataclasses import dataclass, field
from enum import IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Literal

# array.array is generic for type checkers, at run time only from Python 3.12 on
if TYPE_CHECKING:
    Column = array[int]
else:
    Column = array


def column(typecode: Literal["B", "H", "I", "Q"], default: int = 0, of: str = "") -> Any:
    """A numeric column. `of` names the field whose length it shares, so that nil can be read."""
    return field(
        default_factory=lambda: array(typecode),
        metadata={"column": typecode, "default": default, "of": of},
    )


class Kind(IntEnum):
    """What a worker reports about a row; 16 and above end it."""

    STARTED = 1
    MOVED = 2
    HELD = 3
    RESUMED = 4
    PROGRESS = 5
    SETTLED = 6
    FINISHED = 16
    LEFT = 17
    FAILED = 18
    REFUSED = 19
    PREEMPTED = 20

    @property
    def ends(self) -> bool:
        return self >= Kind.FINISHED


class Reason(IntEnum):
    """Why a stream or a channel ended."""

    NONE = 0
    STOP = 1
    LENGTH = 2
    DONE = 3
    CANCELLED = 16
    DEADLINE = 17
    REJECTED = 18
    FAILED = 19
    WORKER_LOST = 20
    QUARANTINED = 21
    CONDUCTOR_LOST = 22
    OWNER_LOST = 23
    DIVERGED = 24
    ABORTED = 25

    @property
    def success(self) -> bool:
        return self in (Reason.STOP, Reason.LENGTH, Reason.DONE)


FLAG_END = 1  # Frames: this channel of the stream ended here
FLAG_CLOSES = 2  # Frames: the stream closes here

ROW_MAY_CLOSE = 1  # Row: the worker may set FLAG_CLOSES
ROW_TRIAL = 2  # Row: runs with nothing else stepping beside it
ROW_PUBLISH = 4  # Row: publish its state when it ends


class Message:
    TAG: ClassVar[int]
    __slots__ = ()


# ---- any peer <-> conductor


@dataclass(frozen=True, slots=True)
class Hello(Message):
    """First message of a session. `inventory` replaces whatever the conductor held of this peer.

    Worker inventory: `{"rows": [[row, stage, count], …], "ends": [[row, kind, value], …],
    "batches": [batch, …]}`. Owner inventory: `{"streams": [[stream, attempt, count], …]}`.
    `versions` are the protocol versions the peer speaks, best first. `specs` are a worker's
    `ModelSpec`s in wire form. `endpoint` is where an owner's stream ROUTER listens.
    `capacity` of a worker: `{"pid": int, "device": str, "threads": int}`.
    """

    TAG: ClassVar[int] = 1
    role: str  # "worker", "gateway" or "client"
    name: str
    life: int
    versions: list[int]
    endpoint: str = ""
    specs: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    capacity: dict[str, Any] = field(default_factory=dict[str, Any])
    inventory: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Welcome(Message):
    TAG: ClassVar[int] = 2
    life: int  # the conductor's
    version: int
    beat_ms: int
    limits: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Refuse(Message):
    """`code` is one of version, fenced, name_taken, resync."""

    TAG: ClassVar[int] = 3
    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Beat(Message):
    """Sent by both sides every `beat_ms`; carries the acknowledgement of a quiet link.

    From a worker, `steps` counts finished engine steps, `step_age_ms` is the age of the step now
    running (0 when idle), and `load` holds named gauges and counters (`pages_free`, `rows`, …).
    """

    TAG: ClassVar[int] = 4
    steps: int = 0
    step_age_ms: int = 0
    load: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Bye(Message):
    TAG: ClassVar[int] = 5
    reason: str


# ---- owner -> conductor


@dataclass(frozen=True, slots=True)
class Submit(Message):
    """A new request. `attempt` is 1, or the owner's current one when it submits again (rule 20).

    `inputs`: `{"tokens": u32 bytes}` for token models. `params`: sampling parameters by name
    (`max_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop_token_ids`, `ignore_eos`).
    `deadline_ms` is relative, 0 for none. `replay`: "history", "restart" or "never" (rule 15).
    """

    TAG: ClassVar[int] = 16
    stream: int
    attempt: int
    model: str
    inputs: dict[str, Any]
    params: dict[str, Any]
    deadline_ms: int = 0
    priority: int = 0
    tenant: str = ""
    replay: str = "history"


@dataclass(frozen=True, slots=True)
class Closed(Message):
    """The owner wrote the terminal event of these streams; on a running request, the cancel.

    `count` is how many positions the owner delivered.
    """

    TAG: ClassVar[int] = 17
    stream: Column = column("Q")
    attempt: Column = column("H", 1, of="stream")
    reason: Column = column("B", of="stream")
    count: Column = column("I", of="stream")


@dataclass(frozen=True, slots=True)
class History(Message):
    """Answer to `Rebase`: what the owner holds. `counts` by channel, `tokens` of channel 0."""

    TAG: ClassVar[int] = 18
    stream: int
    attempt: int
    counts: Column = column("I")
    tokens: Column = column("I")


# ---- conductor -> owner


@dataclass(frozen=True, slots=True)
class End(Message):
    """Proposes the end of streams. `counts[i]` is by channel (empty: close at once).

    `detail[i]` is an error in wire form, or an empty mapping.
    """

    TAG: ClassVar[int] = 32
    stream: Column = column("Q")
    attempt: Column = column("H", 1, of="stream")
    reason: Column = column("B", of="stream")
    counts: list[list[int]] = field(default_factory=list[list[int]])
    detail: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])


@dataclass(frozen=True, slots=True)
class Rebase(Message):
    TAG: ClassVar[int] = 33
    stream: Column = column("Q")
    attempt: Column = column("H", 1, of="stream")


# ---- conductor -> worker


@dataclass(frozen=True, slots=True)
class Owners(Message):
    TAG: ClassVar[int] = 48
    life: int
    endpoint: str
    up: bool


@dataclass(frozen=True, slots=True)
class Open(Message):
    """Open a standing batch. `node` is `model/node`. `limit` as in `Limit`, or nil."""

    TAG: ClassVar[int] = 49
    batch: int
    node: str
    walk: str
    priority: int
    max_rows: int
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A row as `Run` carries it the first time; later `Run`s name it by number only.

    `path`: stages `(batch, tokens)`; `tokens` is how many input tokens that one-shot stage
    consumes, 0 for the standing batch that may close the path. `base`: the output position at
    which this row starts, by channel. `handed`: tokens computed elsewhere that precede it (rule
    10). `max_steps`: most output tokens it may produce in this stay. `outputs`: channel names.
    """

    row: int
    owner: int
    stream: int
    attempt: int
    ordinal: int
    path: list[list[int]]
    base: list[int]
    handed: list[int]
    inputs: dict[str, Any]
    params: dict[str, Any]
    max_steps: int
    flags: int = ROW_MAY_CLOSE
    outputs: list[str] = field(default_factory=list[str])


@dataclass(frozen=True, slots=True)
class Run(Message):
    """Run `rows` in `batch`: a one-shot batch comes whole, a standing batch gains these rows."""

    TAG: ClassVar[int] = 50
    batch: int
    node: str
    walk: str
    priority: int
    rows: list["Row | int"]


@dataclass(frozen=True, slots=True)
class Leave(Message):
    TAG: ClassVar[int] = 51
    row: Column = column("Q")
    publish: Column = column("B", of="row")


@dataclass(frozen=True, slots=True)
class Limit(Message):
    TAG: ClassVar[int] = 52
    batch: int
    last_step: int | None


@dataclass(frozen=True, slots=True)
class Close(Message):
    TAG: ClassVar[int] = 53
    batch: int


@dataclass(frozen=True, slots=True)
class Exit(Message):
    TAG: ClassVar[int] = 56
    grace_ms: int


# ---- worker -> conductor


@dataclass(frozen=True, slots=True)
class Report(Message):
    """What happened to rows. `value`: for moved, the new stage index; for ends and progress, the
    output position reached on channel 0 (absolute, base included). `acked`: positions the owner
    acknowledged. `extras`: by index into the columns: for failed and refused `{"error": wire
    error}`; for finished `{"reason": Reason, "closed": bool}`, `closed` telling that its last frame
    bore FLAG_CLOSES; later also `facts` and `next`.
    """

    TAG: ClassVar[int] = 64
    row: Column = column("Q")
    kind: Column = column("B", of="row")
    value: Column = column("I", of="row")
    acked: Column = column("I", of="row")
    extras: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])


@dataclass(frozen=True, slots=True)
class Leaving(Message):
    TAG: ClassVar[int] = 66
    grace_ms: int


# ---- worker <-> owner


@dataclass(frozen=True, slots=True)
class Frames(Message):
    """One engine step's tokens for one owner: row i has `count[i]` of `tokens`, from `first[i]`.

    `extras`: by row index: `{"error": wire error}` on a failing end.
    """

    TAG: ClassVar[int] = 81
    stream: Column = column("Q")
    attempt: Column = column("H", 1, of="stream")
    channel: Column = column("B", of="stream")
    first: Column = column("I", of="stream")
    count: Column = column("I", 1, of="stream")
    flags: Column = column("B", of="stream")
    reason: Column = column("B", of="stream")
    tokens: Column = column("I")
    extras: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])


@dataclass(frozen=True, slots=True)
class Window(Message):
    """Owner to worker: cumulative acknowledgement. `resend`: send again from `acked` + 1."""

    TAG: ClassVar[int] = 96
    acked: int
    size: int  # bytes the owner is willing to have in flight
    resend: bool = False


CONTROL: tuple[type[Message], ...] = (
    Hello, Welcome, Refuse, Beat, Bye, Submit, Closed, History, End, Rebase,
    Owners, Open, Run, Leave, Limit, Close, Exit, Report, Leaving,
)  # fmt: skip
STREAM: tuple[type[Message], ...] = (Frames, Window)
BY_TAG: dict[int, type[Message]] = {m.TAG: m for m in (*CONTROL, *STREAM)}
