"""The tail of a step on the postprocess thread: the author's stop checks, and publishing."""

from typing import Any, Protocol

from worker.device.base import Device
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.step_runner import StepRunner
from worker.engine.submodule_management import SubmoduleManagement


class HostOutputs(Protocol):
    """Outputs whose values are on the host: request id → name → values. `StepOutputs` is one."""

    def __contains__(self, request_id: int, /) -> bool: ...

    def __getitem__(self, request_id: int, /) -> dict[str, list[Any]]: ...


def check_stop(
    device: Device, m: SubmoduleManagement, batch: ExecutingBatch, outputs: HostOutputs
) -> dict[int, set[str]]:
    """Request → loops to stop (E28). Rows without outputs are not asked; a raise fails one row."""
    stops: dict[int, set[str]] = {}
    if batch.error is not None or not m.submodule.overrides_check_stop:
        return stops
    with device.readback(), m.modes():
        for rid in list(batch.request_ids):
            if rid not in outputs:
                continue
            try:
                found = set(m.submodule.check_stop(batch.per_request_info[rid], outputs[rid]))
            except Exception as e:
                batch.fail(rid, "check_stop", e)
                batch.drop(rid)
                continue
            if found:
                stops[rid] = found
    return stops


def publish(runner: StepRunner, m: SubmoduleManagement, batch: ExecutingBatch) -> None:
    """What each resource hands to other workers, into `finalized` and the infos' facts (E29)."""
    if batch.error is not None or batch.admit_error is not None or not m.publishers:
        return
    for rid in list(batch.request_ids):
        try:
            with runner.lock:
                found = {k: r.publish(rid) for k, r in m.publishers.items()}
        except Exception as e:
            batch.fail(rid, "finalize", e)
            batch.drop(rid)
            continue
        batch.finalized[rid] = found
        batch.per_request_info[rid].facts.update(found)
