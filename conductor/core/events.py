"""What can happen to the conductor. The shell turns the outside world into these values."""

from dataclasses import dataclass, field
from typing import Any

from protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Received:
    """A control message of the peer with this life, in link order. `Hello` opens a session."""

    life: int
    message: Message


@dataclass(frozen=True, slots=True)
class LinkDown:
    """The session with this peer ended: a hole in its sequence, or its backlog overflowed.

    The peer itself may live and say `Hello` again.
    """

    life: int
    why: str


@dataclass(frozen=True, slots=True)
class WorkerExited:
    """The supervisor learnt through its pidfd that a process ended.

    `outside`: the death came from outside (operator, host, the conductor itself), so no row is
    charged for it (rule 16).
    """

    life: int
    outside: bool
    why: str


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. The shell sends one at least every `beat_ms`, and when `next_due` asks."""


@dataclass(frozen=True, slots=True)
class Drain:
    """Admission stops; running streams may finish."""

    grace_ms: int


@dataclass(frozen=True, slots=True)
class Fatal:
    """Supervision gave up: open requests end, naming the cause."""

    why: str
    detail: dict[str, Any] = field(default_factory=dict[str, Any])


Event = Received | LinkDown | WorkerExited | Tick | Drain | Fatal
