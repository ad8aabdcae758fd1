"""The snapshot that the stats socket publishes: its schema, and its bytes.

`podium stats`, exporters and tests read exactly this. Times are milliseconds unless a field says
otherwise; lives are the u64 numbers of docs/wire.md.
"""

# What msgpack returns is untyped until it is checked, in `decode`.
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownMemberType=false, reportMissingTypeStubs=false

from typing import Any, Literal, TypedDict, cast

import msgpack

from protocol.errors import BadMessage

SNAPSHOT = b"snapshot"  # the one request that the stats socket answers
SCHEMA = 1

ChildState = Literal["starting", "ready", "backoff", "stopped"]
Phase = Literal["starting", "ready", "draining", "stopping"]


class ConductorStats(TypedDict):
    name: str
    life: int
    pid: int
    version: str
    phase: Phase
    uptime_s: float


class ChildStats(TypedDict):
    """A supervised process. `pid` 0: it does not run now. `last_exit`: why it ended last, or ''."""

    name: str
    role: str
    pid: int
    life: int
    state: ChildState
    restarts: int
    last_exit: str


class RequestStats(TypedDict):
    """submitted = sum of `closed` (by `Reason` name, lower case) + `open`, at every snapshot."""

    submitted: int
    open: int
    queued: int
    queued_tokens: int
    active: int
    closed: dict[str, int]


class WorkerStats(TypedDict):
    """`state`: a worker lifecycle state in lower case, or "unlinked". `pages`: the KV pool;
    `committed_pages`: what the conductor promised of it. `load`: the worker's own last figures."""

    name: str
    life: int
    pid: int
    state: str
    device: str
    rows: int
    batches: int
    committed_pages: int
    pages: int
    steps: int
    step_age_ms: int
    last_heard_ms: int
    load: dict[str, Any]
    models: list[str]


class OwnerStats(TypedDict):
    name: str
    role: str
    life: int
    streams: int


class MachineStats(TypedDict):
    """What the scheduling core says. `ready`: some worker that was heard of late takes work."""

    requests: RequestStats
    workers: list[WorkerStats]
    owners: list[OwnerStats]
    models: list[str]
    ready: bool
    draining: bool
    counters: dict[str, int]


class HistogramStats(TypedDict):
    """`counts[i]` observations were at most `bounds_ms[i]`, the last `counts` entry is the rest."""

    bounds_ms: list[float]
    counts: list[int]
    total_ms: float
    max_ms: float


class LinkStats(TypedDict):
    """The control socket. `dropped`: frames that no session accepted, by cause."""

    peers: int
    sent: int
    received: int
    refused: int
    waiting_bytes: int
    dropped: dict[str, int]


class Snapshot(TypedDict):
    schema: int
    conductor: ConductorStats
    machine: MachineStats
    children: list[ChildStats]
    gateway_url: str
    links: LinkStats
    ticks: HistogramStats
    bugs: int
    log: dict[str, int]


_PARTS = dict.fromkeys(("conductor", "machine", "links", "ticks"), dict) | {"children": list}


def encode(snapshot: Snapshot) -> bytes:
    packed = msgpack.packb(snapshot, use_bin_type=True)
    assert packed is not None  # it is only with a stream to write to
    return packed


def decode(frame: bytes) -> Snapshot:
    """Raises `BadMessage` on bytes that are no snapshot of this schema."""
    try:
        value = msgpack.unpackb(frame, raw=False, strict_map_key=False)
    except Exception as e:  # msgpack raises a family of unrelated types on bad bytes
        raise BadMessage(f"not a snapshot: {type(e).__name__}") from None
    if not isinstance(value, dict):
        raise BadMessage(f"not a snapshot: a map is expected, got {type(value).__name__}")
    snapshot = cast(dict[str, Any], value)
    if snapshot.get("schema") != SCHEMA:
        raise BadMessage(f"snapshot schema {snapshot.get('schema')!r}; this side reads {SCHEMA}")
    for name, kind in _PARTS.items():
        if not isinstance(snapshot.get(name), kind):
            raise BadMessage(f"not a snapshot: {name!r} is missing or no {kind.__name__}")
    return cast(Snapshot, value)
