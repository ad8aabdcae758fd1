from tests.support.resource_contract import Stack, context
from worker.resources.kv.paged import PagedKv
from worker.resources.positions import Positions


def steps(stack):
    for rid in (1, 2):
        stack.ingest(rid)
    seen = []
    for spans in ({1: 3}, {2: 2, 1: 1}, {1: 1, 2: 1}):
        step, ctx = stack.step(spans)
        assert stack.admit(step, ctx)
        seen.append(stack.plan(step, ctx)["positions"].tolist())
        stack.commit(step, ctx)
    return seen


def test_positions_are_the_same_counted_alone_and_over_a_pool():
    kv = PagedKv(context("kv", layers=1, kv_heads=1, head_dim=1, pages=4))
    expected = [[0, 1, 2], [0, 1, 3], [4, 2]]
    assert steps(Stack([Positions(context("positions"))])) == expected
    assert steps(Stack([kv, Positions(context("positions", kv))])) == expected
