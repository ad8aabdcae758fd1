"""StepRunner: sweeps a node's resources in dependency order (E3, E16, E18).

Holds the one lock over the resources' host state. It is never held across a wait, a launch or an
author's code.
"""

import threading
from collections.abc import Mapping
from typing import Any

from protocol.errors import Bug
from worker.api.inputs import ResourceStep, StepContext, SubmoduleStep
from worker.resources.base import ADMITTED, AdmitOutcome, FullAdmitOutcome, Resource

Sweep = list[tuple[str, Resource, ResourceStep]]


class StepRunner:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._nodes: dict[str, dict[str, Resource]] = {}

    def register(self, node: str, resources: Mapping[str, Resource]) -> None:
        """`resources` in dependency order; a node that owns nothing is registered too."""
        self._nodes[node] = dict(resources)

    def forget(self, node: str) -> None:
        self._nodes.pop(node, None)

    def admit(self, node: str, step: SubmoduleStep | None, ctx: StepContext) -> FullAdmitOutcome:
        """Admit on every resource or on none: a refusal or an exception undoes what was reserved.

        The exception is raised again after the undoing.
        """
        with self.lock:
            tried: Sweep = []
            for key, resource, part in self._sweep(node, step):
                tried.append((key, resource, part))
                try:
                    outcome = resource.admit(part, ctx)
                except BaseException:
                    _undo(tried, ctx)
                    raise
                if not outcome.ok:
                    _undo(tried, ctx)
                    return FullAdmitOutcome(outcome, key)
            return FullAdmitOutcome(ADMITTED)

    def rollback(self, node: str, step: SubmoduleStep | None, ctx: StepContext) -> None:
        """Give back what `admit` reserved for a step that was not committed. Idempotent."""
        with self.lock:
            _undo(self._sweep(node, step), ctx)

    def plan(self, node: str, step: SubmoduleStep | None, ctx: StepContext) -> dict[str, Any]:
        with self.lock:
            results: dict[str, Any] = {}
            for key, resource, part in self._sweep(node, step):
                results[key] = resource.plan(part, ctx, results)
            return results

    def commit(self, node: str, step: SubmoduleStep | None, ctx: StepContext) -> None:
        with self.lock:
            for _, resource, part in self._sweep(node, step):
                resource.commit(part, ctx)

    def retrieve(self, node: str, request_id: int) -> FullAdmitOutcome:
        """The first of the node's resources that is not ready for this request, or ready (E36)."""
        with self.lock:
            for key, resource in self._nodes[node].items():
                outcome: AdmitOutcome = resource.admit_retrieve(request_id)
                if not (outcome.ok and outcome.ready):
                    return FullAdmitOutcome(outcome, key)
            return FullAdmitOutcome(ADMITTED)

    def _sweep(self, node: str, step: SubmoduleStep | None) -> Sweep:
        """The declared resources of the node in dependency order; an unknown one is refused."""
        if step is None:
            return []
        own = self._nodes[node]
        if not step.resources.keys() <= own.keys():
            strange = sorted(step.resources.keys() - own.keys())
            raise Bug(f"node {node!r} declares {strange}, it has {sorted(own)}")
        declared = step.resources
        return [(key, own[key], declared[key]) for key in own if key in declared]


def _undo(sweep: Sweep, ctx: StepContext) -> None:
    """In reverse order, on every resource even if one raises; then the first error is raised."""
    errors: list[Exception] = []
    for key, resource, part in reversed(sweep):
        try:
            resource.rollback(part, ctx)
        except Exception as e:
            e.add_note(f"while rolling back resource {key!r}")
            errors.append(e)
    if errors:
        raise errors[0]
