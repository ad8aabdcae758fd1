import pytest
import torch

from protocol.errors import Bug, InvariantViolation
from tests.support.resource_contract import Stack, context
from worker.api.inputs import RequestInfo, ResourceStep, Segment, StepContext
from worker.resources.base import AdmitFailedReason, ResourceReqConfig
from worker.resources.kv.paged import PagedKv


def make(pages=8, **options):
    base = {"layers": 2, "kv_heads": 1, "head_dim": 2, "pages": pages}
    return PagedKv(context("kv", **{**base, **options}))


def prefill(rid, tokens, position=0, output_position=0):
    info = RequestInfo(rid, "prefill", {}, [1] * tokens, position, output_position)
    ctx = StepContext("n", "prefill", [rid], [info], [tokens])
    return ResourceStep(ctx.segments("main")), ctx


def test_plan_of_a_mixed_step():
    stack = Stack([make()])
    for rid in (1, 2):
        stack.ingest(rid)
    step, ctx = stack.step({1: 17})
    assert stack.admit(step, ctx)
    stack.commit(step, ctx)
    step, ctx = stack.step({2: 3, 1: 1})
    assert stack.admit(step, ctx)
    plan = stack.plan(step, ctx)["kv"]
    assert plan.starts == [0, 17]
    assert plan.spans == [3, 1]
    assert not plan.decode
    assert plan.lengths.tolist() == [3, 18]
    assert plan.positions.tolist() == [0, 1, 2, 17]
    assert plan.page_table.tolist() == [[3, 0], [1, 2]]
    assert plan.slots.tolist() == [48, 49, 50, 33]


def test_decode_plan_follows_page_growth_and_membership():
    stack = Stack([make()])
    for rid in (1, 2):
        stack.ingest(rid)
    segments = None
    for n in range(1, 20):
        step, ctx = stack.step({1: 1, 2: 1})
        segments = segments or step.segments  # a steady batch keeps its segments
        step.segments = segments
        assert stack.admit(step, ctx)
        plan = stack.plan(step, ctx)["kv"]
        assert plan.decode
        assert plan.lengths.tolist() == [n, n]
        own = [plan.page_table[i, (n - 1) // 16].item() * 16 + (n - 1) % 16 for i in (0, 1)]
        assert plan.slots.tolist() == own
        assert len(set(plan.page_table.flatten().tolist())) == plan.page_table.numel()
        stack.commit(step, ctx)


def test_out_of_space_says_the_numbers_and_is_for_the_whole_step():
    stack = Stack([make(pages=3)])
    for rid in (1, 2):
        stack.ingest(rid)
    before = stack.snapshot()
    outcome = stack.resources[0].admit(*stack.step({1: 17, 2: 33}))
    assert outcome.reason is AdmitFailedReason.OUT_OF_SPACE
    assert outcome.detail == "needs 5 pages, 3 free of 3"
    assert stack.snapshot() == before


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "done", "fits"),
    [(16, 33, 0, True), (16, 34, 0, False), (49, 1, 0, False), (40, 30, 21, True)],
)
def test_a_request_that_could_never_fit_is_refused_at_once(prompt, max_tokens, done, fits):
    """3 pages hold 48 tokens; the last output is never stored."""
    kv = make(pages=3)
    kv.ingest_request(1, ResourceReqConfig({"max_tokens": max_tokens}))
    outcome = kv.admit(*prefill(1, prompt, output_position=done))
    assert outcome.ok is fits
    if not fits:
        assert outcome.reason is AdmitFailedReason.TERMINAL
        assert outcome.request_id == 1
        assert "needs up to 4 pages of 16 tokens, the pool has 3" in outcome.detail


def test_the_context_bounds_what_a_request_may_need():
    kv = make(pages=3, context=48)
    kv.ingest_request(1, ResourceReqConfig({"max_tokens": 10_000}))
    assert kv.admit(*prefill(1, 16)).ok


def test_host_tokens_that_leave_a_gap_are_a_bug_of_that_request():
    kv = make()
    kv.ingest_request(1, None)
    outcome = kv.admit(*prefill(1, 4, position=2))
    assert outcome.reason is AdmitFailedReason.TERMINAL
    assert isinstance(outcome.error, Bug)
    assert "position 2" in outcome.detail


def test_streams_have_labels():
    kv = make(labels=("main", "draft"))
    kv.ingest_request(1, None)
    info = RequestInfo(1, "w", {})
    ctx = StepContext("n", "w", [1], [info], [5])
    step = ResourceStep([Segment(1, "main", 5), Segment(1, "draft", 20)])
    assert kv.admit(step, ctx).ok
    kv.commit(step, ctx)
    kv.check()
    assert kv.statistics()["pages_used"] == 3
    with pytest.raises(Bug, match=r"no stream \(1, 'other'\); labels: \('main', 'draft'\)"):
        kv.admit(ResourceStep([Segment(1, "other", 1)]), ctx)
    with pytest.raises(Bug, match="twice"):
        kv.admit(ResourceStep([Segment(1, "main", 1), Segment(1, "main", 1)]), ctx)
    kv.remove_request(1)
    kv.check()
    assert kv.statistics()["pages_used"] == 0


def test_a_partly_filled_page_holds_nothing_of_its_former_request():
    stack = Stack([make(pages=2)])
    kv = stack.resources[0]
    stack.ingest(1)
    step, ctx = stack.step({1: 16})
    assert stack.admit(step, ctx)
    plan = stack.plan(step, ctx)["kv"]
    for layer in (0, 1):
        kv.write(layer, *torch.full((2, 16, 1, 2), float("nan")))
    assert kv.keys(1).isnan().any()
    stack.commit(step, ctx)
    stack.remove(1)
    stack.ingest(2)
    step, ctx = stack.step({2: 3})
    assert stack.admit(step, ctx)
    again = stack.plan(step, ctx)["kv"]
    assert again.page_table[0, 0] == plan.page_table[0, 0]
    assert not kv.storage.isnan().any()


def test_keys_only_and_page_bytes():
    options = {"layers": 3, "kv_heads": 2, "head_dim": 8}
    assert PagedKv.page_bytes(options, torch.bfloat16) == 3 * 2 * 2 * 8 * 16 * 2
    assert PagedKv.page_bytes({**options, "values": False}, torch.float32) == 3 * 2 * 8 * 16 * 4
    kv = make(values=False, dtype=torch.int64)
    assert kv.keys(1).dtype is torch.int64
    assert kv.keys(1).is_contiguous()
    with pytest.raises(ValueError, match="keeps keys only"):
        kv.values(0)
    for layer in (0, 1):
        assert make().values(layer).is_contiguous()


def test_validation_after_warm_up_and_use_outside_a_step():
    stack = Stack([make()])
    stack.ingest(1)
    step, ctx = stack.step({1: 1})
    assert stack.admit(step, ctx)
    with pytest.raises(InvariantViolation, match="1 pages still held after warm-up"):
        stack.resources[0].post_warmup_validate()
    with pytest.raises(Bug, match="outside a planned step"):
        stack.resources[0].write(0, torch.zeros(1, 1, 2))


def test_a_kept_step_follows_its_requests_to_new_slots():
    stack = Stack([make()])
    for rid in (1, 2):
        stack.ingest(rid)
    step, ctx = stack.step({1: 3, 2: 1})
    assert stack.admit(step, ctx)
    stack.commit(step, ctx)
    stack.remove(1)
    stack.remove(2)
    stack.ingest(1)  # takes the slot that 2 had
    stack.ingest(2)
    assert stack.admit(step, ctx)
    stack.commit(step, ctx)
    _, streams = stack.resources[0].snapshot()
    assert {key: length for key, (length, _) in streams.items()} == {
        (1, "main"): 3,
        (2, "main"): 1,
    }


def test_many_requests_outgrow_the_first_tables():
    stack = Stack([make(pages=400)])
    for rid in range(1, 200):
        stack.ingest(rid)
    step, ctx = stack.step(dict.fromkeys(range(1, 200), 20))
    assert stack.admit(step, ctx)
    stack.commit(step, ctx)
    step, ctx = stack.step({1: 1, 150: 30})
    assert stack.admit(step, ctx)
    assert stack.resources[0].pool.free == 0
    stack.check()
