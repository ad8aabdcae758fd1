"""Errors say whose fault it was: client, capacity, worker lost, or a bug.

PodiumError                       code              status  fault
├── ClientError
│   ├── InvalidRequest            invalid_request     400   client
│   ├── PromptTooLong             prompt_too_long     400   client
│   └── UnknownModel              unknown_model       404   client
├── CapacityError
│   ├── Overloaded                overloaded          429   capacity   (retry_after)
│   ├── CannotFit                 cannot_fit          400   capacity   (never would fit)
│   ├── Unavailable               unavailable         503   capacity   (starting, draining, dead)
│   └── DeadlineExceeded          deadline            504   capacity
├── LostError
│   ├── WorkerLost                worker_lost         503   worker_lost (retryable)
│   ├── ConductorLost             conductor_lost      503   worker_lost (retryable)
│   └── Quarantined               quarantined         500   worker_lost
├── RequestFailed                 failed              500   bug         (one request's step failed)
├── WireError
│   ├── BadMessage                bad_message         400   client
│   └── VersionMismatch           version             400   client
├── ConfigError                   config              —     operator    (exit status 78)
└── Bug
    ├── IllegalTransition         illegal_transition  500   bug
    └── InvariantViolation        invariant           500   bug
"""

from typing import Any, ClassVar

EXIT_CONFIG = 78  # sysexits.h EX_CONFIG: supervisors must not restart on it


class PodiumError(Exception):
    """Base of all errors. `detail` is a small mapping of numbers and names for the reader."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    fault: ClassVar[str] = "bug"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **detail: Any) -> None:
        super().__init__(message)
        self.message = message
        self.detail = detail

    def to_wire(self) -> dict[str, Any]:
        """The form that travels in `End.detail` and in `Frames.extras`."""
        return {"code": self.code, "message": self.message, **self.detail}


class ClientError(PodiumError):
    code, status, fault = "client_error", 400, "client"


class InvalidRequest(ClientError):
    code = "invalid_request"


class PromptTooLong(ClientError):
    code = "prompt_too_long"


class UnknownModel(ClientError):
    code, status = "unknown_model", 404


class CapacityError(PodiumError):
    code, status, fault, retryable = "capacity", 503, "capacity", True


class Overloaded(CapacityError):
    code, status = "overloaded", 429


class CannotFit(CapacityError):
    code, status, retryable = "cannot_fit", 400, False


class Unavailable(CapacityError):
    code = "unavailable"


class DeadlineExceeded(CapacityError):
    code, status = "deadline", 504


class LostError(PodiumError):
    code, status, fault, retryable = "lost", 503, "worker_lost", True


class WorkerLost(LostError):
    code = "worker_lost"


class ConductorLost(LostError):
    code = "conductor_lost"


class Quarantined(LostError):
    code, status, retryable = "quarantined", 500, False


class RequestFailed(PodiumError):
    code = "failed"


class WireError(PodiumError):
    code, status, fault = "wire", 400, "client"


class BadMessage(WireError):
    code = "bad_message"


class VersionMismatch(WireError):
    code = "version"


class ConfigError(PodiumError):
    """Configuration that cannot be used: says path, reason and what to write instead."""

    code, fault = "config", "operator"


class Bug(PodiumError):
    """Something that the code promised and did not keep."""

    code = "bug"


class IllegalTransition(Bug):
    """An event that a lifecycle has no row for. Brings the story: the last transitions."""

    code = "illegal_transition"

    def __init__(self, what: str, state: object, event: object, story: list[str] | None = None):
        told = "".join(f"\n  {line}" for line in story or [])
        super().__init__(f"{what}: no transition from {state!s} on {event!s}{told and ':' + told}")
        self.state, self.event = state, event


class InvariantViolation(Bug):
    code = "invariant"


def _walk_tree(root: type[PodiumError]) -> dict[str, type[PodiumError]]:
    found = {root.code: root}
    for child in root.__subclasses__():
        found.update(_walk_tree(child))
    return found


def from_wire(detail: dict[str, Any]) -> PodiumError:
    """Rebuild an error from `to_wire`; an unknown code becomes a plain `PodiumError`."""
    rest = {k: v for k, v in detail.items() if k not in ("code", "message")}
    kind = _walk_tree(PodiumError).get(str(detail.get("code", "")), PodiumError)
    if issubclass(kind, IllegalTransition):
        kind = Bug
    return kind(str(detail.get("message", "")), **rest)
