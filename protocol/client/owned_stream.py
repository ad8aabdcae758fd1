"""One stream as its owner sees it: its history, its attempt, and how it ended."""

from array import array
from collections import deque

from protocol.client.stream_states import Change, State, after
from protocol.errors import (
    ConductorLost,
    DeadlineExceeded,
    PodiumError,
    Quarantined,
    RequestFailed,
    Unavailable,
    WorkerLost,
)
from protocol.messages import Column, Reason, Submit

_STORY = 16  # transitions kept for the message of an IllegalTransition


class OwnedStream:
    """The history is kept whole while the stream is open: a `Rebase` asks for it.

    `tokens` only grows; readers hold a cursor into it. `reason` is `Reason.NONE` until the stream
    is closed. `error` is set with every reason that is neither a success nor a local cancel.
    """

    __slots__ = (
        "attempt", "awaited", "due", "error", "id", "noted_error", "reason", "state", "story",
        "submit", "submitted", "tokens",
    )  # fmt: skip

    def __init__(self, submit: Submit, due: float | None) -> None:
        self.id = submit.stream
        self.submit = submit
        self.attempt = submit.attempt
        self.due = due  # monotonic seconds at which the owner itself ends the stream
        self.state = State.OPEN
        self.tokens: Column = array("I")
        self.awaited: tuple[int, Reason, PodiumError | None] | None = None
        self.reason = Reason.NONE
        self.error: PodiumError | None = None
        self.noted_error: PodiumError | None = None  # told by a failing end that did not close
        self.submitted = False
        self.story: deque[str] = deque(maxlen=_STORY)

    def change(self, change: Change, why: str = "") -> None:
        """Step through the table; raises `IllegalTransition`."""
        what = f"stream {self.id:#x}"
        state = after(self.state, change, what, list(self.story))
        self.story.append(f"{self.state.value} -> {state.value} on {change.value} {why}".rstrip())
        self.state = state


def default_error(reason: Reason, text: str = "") -> PodiumError | None:
    """The error of a reason whose sender gave none; None for success and for a cancel."""
    if reason.success or reason in (Reason.CANCELLED, Reason.NONE):
        return None
    kinds: dict[Reason, tuple[type[PodiumError], str]] = {
        Reason.DEADLINE: (DeadlineExceeded, "the deadline passed"),
        Reason.REJECTED: (Unavailable, "the request was rejected"),
        Reason.WORKER_LOST: (WorkerLost, "the worker that ran the request was lost"),
        Reason.QUARANTINED: (Quarantined, "the request crashed its workers and is not run again"),
        Reason.CONDUCTOR_LOST: (ConductorLost, "the conductor was lost"),
        Reason.OWNER_LOST: (ConductorLost, "the conductor took this client for dead"),
        Reason.DIVERGED: (RequestFailed, "a repeated token differs from the one delivered"),
        Reason.ABORTED: (Unavailable, "the request was aborted: the daemon stops"),
    }
    kind, usual = kinds.get(reason, (RequestFailed, "the request failed"))
    return kind(text or usual)
