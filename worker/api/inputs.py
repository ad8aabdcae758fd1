"""What passes between the engine and an author's submodule."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from worker.api.states import LazyRequestStates


class Segment(NamedTuple):
    """Part of a step's rows: `span` new tokens of one request under one label (a KV stream)."""

    request_id: int
    label: str
    span: int


def _no_facts() -> dict[str, Any]:
    """A step makes one for each of its rows; calling `dict[str, Any]` costs thrice as much."""
    return {}


@dataclass(slots=True)
class RequestInfo:
    """What the engine knows of one request, host side. An author reads it and never writes.

    `tokens`: input tokens of this stage, known to the host (a prefill chunk); empty where the
    input feeds back on the device (decode). `position`: tokens already in the request's state,
    as the scheduler counts them; resources count for themselves and refuse host tokens that do
    not continue what they hold. One object describes one step and is not changed after it was
    handed over: several steps of a request are in flight at once.
    `output_position`: index of the next output in its channel; keys random draws (with `seed`).
    `samples`: this step's last position yields an output (False for all but the last chunk).
    """

    request_id: int
    walk: str
    params: Mapping[str, Any]
    tokens: Sequence[int] = ()
    position: int = 0
    output_position: int = 0
    samples: bool = True
    facts: dict[str, Any] = field(default_factory=_no_facts)


@dataclass(slots=True)
class NodeInputs:
    """One request's prepared inputs for one step: named tensors, and its new tokens' count."""

    span: int
    tensors: dict[str, torch.Tensor] = field(default_factory=dict[str, torch.Tensor])


@dataclass(slots=True)
class StepContext:
    """The rows of one step of one node, real rows first, padding rows (ids below 0) after."""

    node: str
    walk: str
    request_ids: list[int]
    infos: list[RequestInfo]
    spans: list[int]
    captured: bool = False
    #: The same rows as in the step before of this node and walk, all fed back on the device.
    steady: bool = False

    def segments(self, label: str) -> list[Segment]:
        return [Segment(r, label, s) for r, s in zip(self.request_ids, self.spans, strict=True)]


@dataclass(slots=True)
class ResourceStep:
    """What one resource is asked for in one step: segments, and options by name."""

    segments: list[Segment]
    options: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(slots=True)
class SubmoduleStep:
    """A submodule's declaration (E15): resource key → what this step needs of it."""

    resources: dict[str, ResourceStep] = field(default_factory=dict[str, ResourceStep])


@dataclass(slots=True)
class ModelInputsFromEngine:
    """What `preprocess` and the forwards get beside their own tensors (E19).

    `resources`: the node's resources by key, planned for this step. `plans`: what each returned
    from `plan`. `states`: the author's per-request states, made on first use.
    """

    request_ids: list[int]
    infos: list[RequestInfo]
    resources: Mapping[str, Any]
    plans: Mapping[str, Any]
    states: LazyRequestStates
    step: SubmoduleStep | None
    device: torch.device
    captured: bool = False
    piecewise: Mapping[str, Any] = field(default_factory=dict[str, Any])
