import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import Bug
from tests.support.resource_contract import context
from worker.api.inputs import RequestInfo, ResourceStep, StepContext
from worker.resources.base import ResourceReqConfig
from worker.resources.random_draws import gumbel_noise, row_keys
from worker.resources.sampler import Sampler, filter_scores


class Rows:
    """Steps of a sampler over requests with these parameters, ids from 1."""

    def __init__(self, *params):
        self.sampler = Sampler(context("sampler"))
        for rid, p in enumerate(params, 1):
            self.sampler.ingest_request(rid, ResourceReqConfig(p))

    def plan(self, rids, positions=None, spans=None, samples=None):
        spans = spans or [1] * len(rids)
        infos = [
            RequestInfo(r, "w", {}, output_position=p, samples=s)
            for r, p, s in zip(
                rids, positions or [0] * len(rids), samples or [True] * len(rids), strict=True
            )
        ]
        self.ctx = StepContext("n", "w", list(rids), infos, spans)
        self.step = ResourceStep(self.ctx.segments("main"))
        return self.sampler.plan(self.step, self.ctx, {})

    def sample(self, logits, rids, positions=None, **how):
        self.plan(rids, positions, **how)
        tokens = self.sampler.sample(logits)
        self.sampler.commit(self.step, self.ctx)
        return tokens.tolist()


GREEDY = {"temperature": 0.0}
HOT = {"temperature": 1.0, "seed": 7}


def test_greedy_takes_the_best_and_feeds_it_back():
    rows = Rows(GREEDY, {}, {"temperature": 1e-4})
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 1.0], [0.0, 0.0, 9.0]])
    assert rows.sample(logits, [1, 2, 3]) == [1, 0, 2]
    rows.plan([3, 1])
    assert rows.sampler.last_tokens().tolist() == [2, 1]


def test_last_position_of_the_rows_that_sample():
    rows = Rows(GREEDY, GREEDY, GREEDY)
    plan = rows.plan([1, 2, 3], spans=[2, 3, 1], samples=[True, False, True])
    assert plan.request_ids == [1, 3]
    assert plan.last_index.tolist() == [1, 5]
    x = torch.arange(12).view(6, 2)
    assert rows.sampler.last_rows(x).tolist() == [[2, 3], [10, 11]]
    rows.sampler.accept(torch.tensor([40, 41]))
    rows.sampler.commit(rows.step, rows.ctx)
    rows.plan([1, 2, 3])
    assert rows.sampler.last_tokens().tolist() == [40, 0, 41]
    assert rows.sampler.last_rows(x) is x


def test_no_row_samples():
    rows = Rows(HOT)
    assert rows.sample(torch.zeros(0, 5), [1], spans=[4], samples=[False]) == []


def test_a_forward_that_sampled_and_failed_leaves_no_trace():
    rows = Rows(GREEDY)
    rows.sample(torch.tensor([[0.0, 1.0]]), [1])
    rows.plan([1])
    rows.sampler.sample(torch.tensor([[1.0, 0.0]]))
    rows.sampler.rollback(rows.step, rows.ctx)
    rows.plan([1])
    assert rows.sampler.last_tokens().tolist() == [1]


def test_misuse_is_named():
    rows = Rows(GREEDY)
    with pytest.raises(Bug, match="outside a planned step"):
        rows.sampler.last_tokens()
    rows.plan([1])
    with pytest.raises(ValueError, match=r"logits \[2, 3\] for 1 rows"):
        rows.sampler.sample(torch.zeros(2, 3))
    with pytest.raises(Bug, match="the forward chose no token"):
        rows.sampler.commit(rows.step, rows.ctx)
    rows.sampler.sample(torch.zeros(1, 3))
    with pytest.raises(Bug, match="second sample"):
        rows.sampler.accept(torch.zeros(1, dtype=torch.int64))
    for bad in ({"temperature": -1.0}, {"temperature": math.inf}, {"top_p": 1.5}):
        with pytest.raises(ValueError, match="out of range"):
            rows.sampler.ingest_request(9, ResourceReqConfig(bad))
    assert 9 not in rows.sampler.snapshot()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_row_draws_the_same_alone_and_in_any_company(data):
    params = [
        {
            "temperature": data.draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
            "top_k": data.draw(st.sampled_from([0, 1, 5, 100])),
            "top_p": data.draw(st.sampled_from([1.0, 0.9, 0.1, 0.0])),
            "seed": data.draw(st.integers(-(2**63), 2**64 - 1)),
        }
        for _ in range(4)
    ]
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    positions = [data.draw(st.integers(0, 2**31)) for _ in params]
    order = data.draw(st.permutations([0, 1, 2, 3]))[: data.draw(st.integers(1, 4))]
    together = Rows(*params).sample(logits, [1, 2, 3, 4], positions)
    some = Rows(*params).sample(
        logits[order], [i + 1 for i in order], [positions[i] for i in order]
    )
    assert some == [together[i] for i in order]


def test_draws_follow_the_softmax():
    """Chi-square over 20,000 positions of one seed, temperature 0.7, 8 tokens."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5, 0.5, -3.0, 1.5])
    n = 20_000
    rows = Rows({"temperature": 0.7, "seed": 11})
    rids, spans = [1], [1]
    counts = np.zeros(8)
    for position in range(0, n, 1000):
        low, high = row_keys(np.full(1000, 11, np.uint64), range(position, position + 1000))
        noise = gumbel_noise(torch.from_numpy(low), torch.from_numpy(high), 8)
        counts += np.bincount((logits / 0.7 + noise).argmax(-1).numpy(), minlength=8)
        assert rows.sample(logits[None], rids, [position], spans=spans) == [
            (logits / 0.7 + noise[0]).argmax().item()
        ]
    expected = (logits / 0.7).softmax(0).numpy() * n
    assert ((counts - expected) ** 2 / expected).sum() < 24.3  # 0.1 % point of chi-square, 7


@pytest.mark.parametrize("by", ["seed", "position", "token"])
def test_draws_are_uncorrelated_along(by):
    """Lag-1 correlation of 40,000 uniform draws along each of the three keys."""
    n = 200
    if by == "seed":
        low, high = row_keys(np.arange(n, dtype=np.uint64), [3] * n)
    else:
        low, high = row_keys(np.zeros(n, np.uint64), range(n))
    noise = gumbel_noise(torch.from_numpy(low), torch.from_numpy(high), n)
    noise = noise if by == "token" else noise.T
    uniform = (-(-noise.double()).exp()).exp()
    assert abs(uniform.mean().item() - 0.5) < 0.01
    assert abs(uniform.var().item() - 1 / 12) < 0.005
    a, b = uniform[:, :-1].flatten() - 0.5, uniform[:, 1:].flatten() - 0.5
    assert abs((a * b).mean().item() * 12) < 0.02


def test_both_halves_of_a_rows_key_matter():
    """Rows whose keys agree in one half don't even share values in another order."""
    low = torch.tensor([1, 1, 2], dtype=torch.int32)
    high = torch.tensor([5, 6, 5], dtype=torch.int32)
    noise = gumbel_noise(low, high, 500).sort(-1).values
    for a, b in ((0, 1), (0, 2)):
        assert not torch.isclose(noise[a], noise[b], atol=0, rtol=1e-7).all()


def test_a_rare_token_keeps_its_probability():
    """p = 1e-4 beside one likely token: 400 are expected in 4,000,000 draws."""
    n, hits = 4_000_000, 0
    logits = torch.tensor([0.0, math.log(1e-4 / (1 - 1e-4))])
    for start in range(0, n, 500_000):
        low, high = row_keys(np.full(500_000, 3, np.uint64), range(start, start + 500_000))
        noise = gumbel_noise(torch.from_numpy(low), torch.from_numpy(high), 2)
        hits += int((logits + noise).argmax(-1).sum())
    assert abs(hits - 400) < 4 * 20


def allowed(scores, k, p):
    """Plain twin of `filter_scores`: the set of tokens that may be drawn."""
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))[: k or None]
    top = max(scores)
    weights = [math.exp(scores[i] - top) for i in order]
    total, before, kept = sum(weights), 0.0, set()
    for i, w in zip(order, weights, strict=True):
        if kept and before >= p:
            break
        kept.add(i)
        before += w / total
    return kept


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(-20, 20), min_size=12, max_size=12),
            st.integers(0, 14),
            st.sampled_from([0.0, 0.07, 0.33, 0.51, 0.77, 0.97, 1.0]),
        ),
        min_size=1,
        max_size=5,
    )
)
def test_top_k_and_top_p_against_a_plain_reference(rows):
    scores = torch.tensor([r[0] for r in rows]) / 4.0
    got = filter_scores(
        scores, torch.tensor([r[1] for r in rows]), torch.tensor([r[2] for r in rows])
    )
    for i, (_, k, p) in enumerate(rows):
        kept = set((got[i] > float("-inf")).nonzero().flatten().tolist())
        assert kept == allowed(scores[i].tolist(), k, float(np.float32(p)))
        assert torch.equal(got[i, list(kept)], scores[i, list(kept)])


def test_top_p_stops_where_the_sum_reaches_it():
    got = filter_scores(torch.zeros(1, 4), torch.tensor([0]), torch.tensor([0.5]))
    assert got.tolist() == [[0.0, 0.0, -math.inf, -math.inf]]


def test_only_allowed_tokens_are_drawn_and_all_of_them():
    logits = torch.tensor([[1.0, 0.9, 0.8, -1.0, 0.7]])
    rows = Rows({"temperature": 1.0, "top_k": 3, "seed": 1}, {"temperature": 1.0, "top_p": 0.5})
    drawn = [rows.sample(logits.expand(2, -1), [1, 2], [i, i]) for i in range(200)]
    assert {d[0] for d in drawn} == {0, 1, 2}
    assert {d[1] for d in drawn} == {0, 1}


def test_more_requests_than_the_first_columns_hold_keep_their_tokens():
    rows = Rows(*[GREEDY] * 60)
    rows.sample(torch.eye(60), list(range(1, 61)))
    for rid in range(61, 200):
        rows.sampler.ingest_request(rid, None)
    assert list(rows.sampler.snapshot().values())[:60] == list(range(60))
