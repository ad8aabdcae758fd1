"""ExecutingBatch: one step of one node for some requests. It and its events travel together.

main builds it → gpu prepares, launches, commits and posts it → postprocess reads its values →
main learns what ended. Whoever waits on an event checks `error` after it.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

from worker.api.inputs import NodeInputs, RequestInfo, StepContext, SubmoduleStep
from worker.api.outputs import StepOutputs


@dataclass(slots=True)
class ExecTimings:
    """Seconds spent in each stage of one step (E42); `queued` is from submission to preparation."""

    queued: float = 0.0
    prepare: float = 0.0
    reserve: float = 0.0
    plan: float = 0.0
    launch_wait: float = 0.0
    forward: float = 0.0
    commit: float = 0.0
    device: float = 0.0
    postprocess: float = 0.0


@dataclass(slots=True)
class FailedRequest:
    request_id: int
    stage: str
    error: BaseException


@dataclass(slots=True)
class ExecutingBatch:
    """`step` counts this worker's steps from 1. `batch` is the wire's batch id.

    `skipped_rids` had nothing to do this step; `failed_requests` failed alone; `admit_error` and
    `failed_resource` tell a refused admission (outputs are then empty, and the rows stay in
    `request_ids`, to be tried again); `error` fails the whole step. Skipped and failed requests
    have left `request_ids`. `commit_done` and `outputs_ready` are set on every exit (E23).
    """

    step: int
    batch: int
    node_name: str  # "model/node"
    walk: str
    request_ids: list[int]
    per_request_info: dict[int, RequestInfo]
    submitted_at: float = 0.0

    running_batched: bool = True
    cg_key_info: Any = None
    step_context: StepContext | None = None
    declared: SubmoduleStep | None = None
    inputs: dict[int, NodeInputs] = field(default_factory=dict[int, NodeInputs])
    plans: dict[str, Any] = field(default_factory=dict[str, Any])

    skipped_rids: list[int] = field(default_factory=list[int])
    failed_requests: dict[int, FailedRequest] = field(default_factory=dict[int, FailedRequest])
    admit_error: Any = None  # AdmitOutcome of the refusal
    failed_resource: str | None = None
    outputs: StepOutputs = field(default_factory=StepOutputs)
    error: BaseException | None = None

    launch_started_event: threading.Event = field(default_factory=threading.Event)
    commit_done: threading.Event = field(default_factory=threading.Event)
    outputs_ready: threading.Event = field(default_factory=threading.Event)
    completion_event: Any = None  # DeviceEvent recorded after the step's device work
    exec_timings: ExecTimings = field(default_factory=ExecTimings)
    finalized: dict[int, dict[str, Any]] = field(default_factory=dict[int, dict[str, Any]])

    def drop(self, request_id: int) -> None:
        """Take a request out of the step, keeping every per-request structure consistent (E11)."""
        if request_id in self.per_request_info:
            self.request_ids.remove(request_id)
            del self.per_request_info[request_id]
            self.inputs.pop(request_id, None)
            self.outputs.drop(request_id)
            self.step_context = None

    def fail(self, request_id: int, stage: str, error: BaseException) -> None:
        """Record one request's failure; the caller drops it where that stage requires it."""
        self.failed_requests[request_id] = FailedRequest(request_id, stage, error)
