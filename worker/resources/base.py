"""Resource: state or machinery that a node's compute needs, driven step by step.

Order within a step, in dependency order over a node's resources: `admit` (a transaction over all
of them, E16) → `plan` → the forward → `commit`. Every method but the constructor has a default
that does nothing, so a new resource is small. All methods run on the GPU thread unless their
docstring says otherwise; the resources' host state has one lock, held by the step runner.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, ClassVar

import torch

from protocol.errors import PodiumError
from worker.api.inputs import ResourceStep, StepContext


class AdmitFailedReason(Enum):
    OUT_OF_SPACE = "out_of_space"  # evict or hold, then retry
    OFFLOADING = "offloading"  # retry after the reload; evict nothing
    TERMINAL = "terminal"  # fail the request


@dataclass(frozen=True, slots=True)
class AdmitOutcome:
    """`ok`: reserved. `ready`: usable now. `detail`: the numbers behind a refusal.

    `error`: what a TERMINAL refusal fails the request with; None: `CannotFit` with the detail.
    """

    ok: bool
    ready: bool = True
    reason: AdmitFailedReason | None = None
    detail: str = ""
    request_id: int | None = None  # whom a TERMINAL refusal fails; None: every row
    error: PodiumError | None = None


ADMITTED = AdmitOutcome(True)


@dataclass(frozen=True, slots=True)
class FullAdmitOutcome:
    outcome: AdmitOutcome
    failed_resource: str | None = None


@dataclass(frozen=True, slots=True)
class ResourceReqConfig:
    """Per-request override for one resource, from the request's parameters."""

    options: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ResourceContext:
    """What every resource is built with (E2).

    `options` are the spec's, with `pages` (what a pool holds for requests) and `context` (most
    tokens of one request) filled in by the engine where the spec leaves them out.
    """

    key: str
    device: torch.device
    dtype: torch.dtype  # KV dtype; default: the compute dtype
    depends_on: Mapping[str, "Resource"]
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Resource:
    """`options_known`: names that `options` may hold; the engine refuses others at load.

    `pooled`: this kind holds pages; the engine then passes `pages` and asks `page_bytes`.
    """

    options_known: ClassVar[frozenset[str]] = frozenset()
    pooled: ClassVar[bool] = False

    def __init__(self, context: ResourceContext) -> None:
        self.context = context
        self.key = context.key

    @classmethod
    def page_bytes(cls, options: Mapping[str, Any], dtype: torch.dtype) -> int:
        """Bytes of one page over all layers; 0 where the kind holds no pages."""
        return 0

    # ---- a request's life

    def ingest_request(self, request_id: int, overrides: ResourceReqConfig | None) -> None:
        """A request arrives. Idempotent."""

    def remove_request(self, request_id: int) -> None:
        """Free everything of a request. Idempotent (E39)."""

    def admit_retrieve(self, request_id: int) -> AdmitOutcome:
        """State published elsewhere starts to arrive; polled until ready (E36)."""
        return ADMITTED

    def publish(self, request_id: int) -> dict[str, Any]:
        """What another worker needs to continue this request (E29)."""
        return {}

    # ---- a step

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        """Reserve what the step needs. Refused: nothing is reserved by this call.

        Re-admitting an unchanged step reserves nothing twice.
        """
        return ADMITTED

    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        """Give back exactly what `admit` reserved for this step (E16). Idempotent."""

    def plan(self, step: ResourceStep, ctx: StepContext, plan_results: Mapping[str, Any]) -> Any:
        """Host and device structures for the forward; may use earlier resources' results (E18)."""
        return None

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        """The launch happened: advance host state by the step. Waits for nothing (E21)."""

    # ---- engine level

    def reset_request(self, request_id: int) -> None:
        """Back to an ingested, empty request (preemption by recompute)."""

    def post_warmup_validate(self) -> None:
        """Raise if the state after warm-up is not what serving may start from (E9)."""

    def check(self) -> None:
        """Invariants; raises InvariantViolation with the numbers (promise P16)."""

    def snapshot(self) -> Any:
        """All state that a step may change, as values that compare equal iff the state does.

        Slow, and reads device values: for tests and for the story of a failed invariant.
        """
        return None

    def statistics(self) -> dict[str, int | float]:
        return {}

    def cleanup(self) -> None:
        """Free device and pinned memory. Called once (E40)."""
