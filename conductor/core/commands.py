"""What the core decides. The shell performs these, one method per command, in order."""

from dataclasses import dataclass

from protocol.messages import Message


@dataclass(frozen=True, slots=True)
class Send:
    """Send on the control link of this life; dropped if that session is gone."""

    life: int
    message: Message


@dataclass(frozen=True, slots=True)
class Forget:
    """Close the session of this life; later frames of it are dropped. `owner_lost`: it was a stream
    owner's and never comes back, so nobody is left to remove the socket that it listened on."""

    life: int
    owner_lost: bool = False


@dataclass(frozen=True, slots=True)
class Kill:
    """SIGKILL this worker incarnation: it hangs. The supervisor replaces it.

    `outside` is False: a hang inside a step charges that step's rows.
    """

    life: int
    why: str


@dataclass(frozen=True, slots=True)
class Note:
    """A line for the log, with what the reader needs."""

    level: str
    text: str
    detail: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True, slots=True)
class Drained:
    """After `Drain`: nothing is open any more (or the grace is over); the daemon may exit."""


Command = Send | Forget | Kill | Note | Drained
