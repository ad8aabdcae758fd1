"""One request's exception fails it alone, wherever it is raised (E11, E27, E28)."""

import pytest

from protocol.faults import PlantedFault
from tests.support.engine_harness import Harness, reference
from worker.models.reference_hash import reference_tokens

POISON = 200
PROMPTS = {rid: [rid, rid + 1, rid + 2] for rid in range(1, 8)}
PROMPTS[5] = [5, POISON, 7]


def harness(**fault):
    h = Harness(reference(faults=[{"when_token": POISON, **fault}]))
    h.add(*PROMPTS)
    return h


@pytest.mark.parametrize("point", ["prepare", "forward", "postprocess"])
@pytest.mark.parametrize("at", [0, 3])
def test_the_poisoned_request_fails_alone(point, at):
    h = harness(point=point, at=at)
    failed = {}
    rids = list(PROMPTS)
    batch = h.step(PROMPTS)
    for _ in range(6):
        assert batch.error is None
        failed.update(batch.failed_requests)
        rids = [r for r in rids if r not in failed]
        batch = h.step(rids)
    assert list(failed) == [5]
    assert failed[5].stage == point
    assert isinstance(failed[5].error, PlantedFault)
    assert "request 5" in str(failed[5].error)
    assert 5 not in batch.outputs
    assert h.out[5] == reference_tokens(PROMPTS[5], at)
    for rid in rids:
        assert h.out[rid] == reference_tokens(PROMPTS[rid], 7)
    assert h.engine.statistics()["failed_requests"] == 1
    h.remove(*PROMPTS)
    h.engine.check()
    assert h.engine.statistics()["pages_used"] == 0


def test_check_stop_raises_for_one_request_only():
    h = harness(point="check_stop")
    batch = h.step(PROMPTS)
    assert h.engine.check_stop_for_batch(batch, batch.outputs) == {}
    assert list(batch.failed_requests) == [5]
    assert batch.failed_requests[5].stage == "check_stop"
    assert 5 not in batch.request_ids
    assert 4 in batch.outputs


def test_a_forward_that_fails_once_is_retried_without_a_victim():
    """The fault fires once: the halves then all succeed, from exactly the state before."""
    h = harness(point="forward", at=2, times=1)
    h.step(PROMPTS)
    for _ in range(5):
        assert not h.step(list(PROMPTS)).failed_requests
    for rid, prompt in PROMPTS.items():
        assert h.out[rid] == reference_tokens(prompt, 6)


def test_all_rows_poisoned():
    h = Harness(reference(faults=[{"point": "forward"}]), pages=7)
    h.add(1, 2, 3)
    batch = h.step({r: [1, 2] for r in (1, 2, 3)})
    assert batch.error is None
    assert sorted(batch.failed_requests) == [1, 2, 3]
    assert len(batch.outputs) == 0
    assert h.engine.statistics()["pages_free"] == 7
