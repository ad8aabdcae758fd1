"""Requests: who may use which nodes, and the freeing of all that they own (E36, E39)."""

from collections.abc import Callable, Mapping
from typing import Any

from protocol.errors import CannotFit, RequestFailed
from worker.device.base import Device
from worker.engine.step_runner import StepRunner
from worker.engine.submodule_management import SubmoduleManagement
from worker.resources.base import AdmitFailedReason, ResourceReqConfig


class Requests:
    """Runs on the GPU thread."""

    def __init__(self, device: Device, runner: StepRunner) -> None:
        self._device = device
        self._runner = runner
        self._nodes: dict[int, list[SubmoduleManagement]] = {}

    def __len__(self) -> int:
        return len(self._nodes)

    def add(
        self,
        m: SubmoduleManagement,
        request_id: int,
        params: Mapping[str, Any],
        overrides: Mapping[str, Mapping[str, Any]],
    ) -> None:
        if request_id in m.requests:
            return
        self._nodes.setdefault(request_id, []).append(m)
        m.requests.add(request_id)
        try:
            with self._device.compute(), self._runner.lock:
                for key, resource in m.resources.items():
                    options = {**params, **overrides.get(key, {})}
                    resource.ingest_request(request_id, ResourceReqConfig(options))
        except BaseException:
            self.remove(request_id)
            raise

    def remove(self, request_id: int) -> None:
        """Every resource and submodule is asked, even if one raises; then the first is raised."""
        nodes = self._nodes.pop(request_id, [])
        owned = {id(r): r for m in nodes for r in m.resources.values()}
        errors: list[Exception] = []
        with self._device.compute():
            with self._runner.lock:
                for resource in reversed(list(owned.values())):
                    attempt(lambda r=resource: r.remove_request(request_id), errors)
            for m in nodes:
                attempt(lambda m=m: m.remove_request(request_id), errors)
        if errors:
            raise errors[0]

    def ready(self, request_id: int) -> bool:
        if request_id not in self._nodes:
            raise RequestFailed(f"request {request_id} is not known here")
        for m in self._nodes[request_id]:
            found = self._runner.retrieve(m.name, request_id)
            outcome = found.outcome
            if outcome.reason is AdmitFailedReason.TERMINAL:
                raise outcome.error or CannotFit(f"{found.failed_resource}: {outcome.detail}")
            if not (outcome.ok and outcome.ready):
                return False
        return True

    def clear(self) -> None:
        self._nodes.clear()


def attempt(call: Callable[[], None], errors: list[Exception]) -> None:
    """Call; an Exception joins `errors`, so that the rest of an upkeep still runs."""
    try:
        call()
    except Exception as e:
        errors.append(e)
