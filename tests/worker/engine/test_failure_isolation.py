"""Whatever the stage, one request's exception fails that request alone, and says where it was.

E11, E14, E15, E27, E28, E29, over one table of stages; the state of the others is as if it had not
been there.
"""

from typing import Any

import pytest
import torch

from tests.support.engine_harness import Harness, one_node
from tests.support.worker_rig import Rig
from worker.api.inputs import NodeInputs, ResourceStep, SubmoduleStep
from worker.api.model import NodeResourceSpec
from worker.api.outputs import StepOutputs
from worker.api.submodule import NodeSubmodule
from worker.models.reference_hash import reference_tokens
from worker.resources import registry
from worker.resources.base import ADMITTED, AdmitFailedReason, AdmitOutcome, Resource

CULPRIT = 3
ROWS = (1, 2, CULPRIT, 4, 5)
SPECS = (
    NodeResourceSpec(
        "kv", "paged_kv", ("decoder",), options={"layers": 1, "kv_heads": 1, "head_dim": 1}
    ),
    NodeResourceSpec("picky", "picky", ("decoder",), ("kv",)),
)


class Picky(Resource):
    """Raises in `plan` or `publish`, or refuses for good, where the culprit takes part."""

    where = ""

    def admit(self, step: Any, ctx: Any) -> AdmitOutcome:
        if self.where == "admit" and CULPRIT in ctx.request_ids:
            return AdmitOutcome(False, False, AdmitFailedReason.TERMINAL, "no", CULPRIT)
        return ADMITTED

    def plan(self, step: Any, ctx: Any, plan_results: Any) -> None:
        if self.where == "plan" and CULPRIT in ctx.request_ids:
            raise ValueError("plan")

    def publish(self, request_id: int) -> dict[str, Any]:
        if self.where == "finalize" and request_id == CULPRIT:
            raise ValueError("finalize")
        return {}


class Culprit(NodeSubmodule):
    def __init__(self, where: str, batchable: bool) -> None:
        super().__init__()
        self.where, self.batchable = where, batchable

    def hook(self, stage: str, rids: Any) -> None:
        if stage == self.where and CULPRIT in rids:
            raise ValueError(stage)

    def prepare_inputs(self, info: Any) -> NodeInputs:
        self.hook("prepare", [info.request_id])
        return NodeInputs(max(1, len(info.tokens)), {"rid": torch.tensor(info.request_id)})

    def can_batch(self, walk: str, inputs: Any) -> bool:
        self.hook("can_batch", [int(i.tensors["rid"]) for i in inputs])
        return self.batchable

    def declare_step(self, ctx: Any) -> SubmoduleStep:
        self.hook("declare", ctx.request_ids)
        rows = ResourceStep(ctx.segments("main"))
        return SubmoduleStep({"kv": rows, "picky": rows})

    def preprocess(self, engine: Any, inputs: Any) -> dict[str, torch.Tensor]:
        self.hook("preprocess", engine.request_ids)
        return {"x": torch.tensor(engine.request_ids)}

    def forward_batched(self, engine: Any, **tensors: torch.Tensor) -> StepOutputs:
        self.hook("forward", engine.request_ids)
        return StepOutputs(engine.request_ids, {"tokens": tensors["x"]})

    forward = forward_batched

    def postprocess(self, info: Any, outputs: Any) -> Any:
        self.hook("postprocess", [info.request_id])
        return outputs

    def check_stop(self, info: Any, outputs: Any) -> set[str]:
        self.hook("check_stop", [info.request_id])
        return set()


STAGES = ("prepare", "can_batch", "declare", "admit", "plan", "preprocess", "forward")
TAIL = ("postprocess", "check_stop", "finalize")


@pytest.mark.parametrize("batchable", [True, False])
@pytest.mark.parametrize("stage", [*STAGES, *TAIL])
def test_only_the_culprit_fails_and_its_stage_is_named(
    stage: str, batchable: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(registry.KINDS, "picky", Picky)
    monkeypatch.setattr(Picky, "where", stage)
    h = Harness(one_node(Culprit(stage, batchable), *SPECS), pages=20)
    h.add(*ROWS)
    batch = h.step({r: [1] for r in ROWS})
    if stage in TAIL[1:]:
        h.engine.check_stop_for_batch(batch, batch.outputs)
        h.engine.finalize_batch(batch)
    assert batch.error is None
    assert list(batch.failed_requests) == [CULPRIT]
    failed = batch.failed_requests[CULPRIT]
    assert failed.stage == stage
    assert str(failed.error) == (stage if stage != "admit" else "picky: no")
    assert [r for r in batch.outputs if r != CULPRIT] == [1, 2, 4, 5]
    launched = stage in TAIL
    assert h.engine.statistics()["pages_used"] == (5 if launched else 4), "not rolled back"
    again = h.step([1, 2, 4, 5])
    assert not again.failed_requests
    assert sorted(again.outputs) == [1, 2, 4, 5]


def test_a_group_that_can_be_judged_by_nobody_fails_whole() -> None:
    """`can_batch` raises for all together and for none alone: nobody is the culprit."""

    class Together(Culprit):
        def can_batch(self, walk: str, inputs: Any) -> bool:
            if len(inputs) > 1:
                raise ValueError("together")
            return True

    h = Harness(one_node(Together("", True), SPECS[0]), pages=20)
    h.add(1, 2)
    batch = h.step({1: [1], 2: [1]})
    assert str(batch.error) == "together"
    assert not batch.failed_requests
    assert h.engine.statistics()["pages_used"] == 0


POISON = 200


@pytest.mark.parametrize("point", ["prepare", "forward", "postprocess", "check_stop"])
def test_a_failed_row_tells_its_story_to_the_conductor(point: str) -> None:
    """Stage, type, message, node, step, and what the row went through."""
    rig = Rig(faults=[{"point": point, "when_token": POISON, "at": 2}])
    try:
        asked = {1: [40, 41], 2: [42, POISON], 3: [43]}
        rig.run([rig.row(i, p, 6, batch=900) for i, p in asked.items()])
        rig.until_ended(*asked)
        rig.rest()
        error = rig.conductor.end(2)[2]["error"]
        assert error["code"] == "failed"
        assert error["type"] == "PlantedFault"
        assert error["message"].startswith(f"PlantedFault: planted in {point}")
        assert error["stage"] == point
        assert error["node"] == "m/decoder"
        assert error["step"] == 3
        assert error["story"][0] == "WAITING -STEP-> RUNNING (1)"
        assert error["story"][-1].startswith("RUNNING -FAIL-> ENDED")
        for i in (1, 3):
            assert rig.owner.tokens(i) == reference_tokens(asked[i], 6)
    finally:
        rig.close()
