"""Against softmax written out, per row over its whole history, in float64."""

import pytest
import torch
from torch.nn import functional

from protocol.errors import Bug
from tests.support.resource_contract import Stack, context
from worker.resources.attention.sdpa import SdpaAttention
from worker.resources.kv.paged import PagedKv

KV_HEADS, GROUP, DIM, LAYERS = 2, 3, 8, 2


class History:
    """Every row's keys and values so far, and what attention over them should give."""

    def __init__(self, **options):
        self.kv = PagedKv(context("kv", layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM, pages=40))
        self.attention = SdpaAttention(context("attention", self.kv, **options))
        self.stack = Stack([self.kv, self.attention])
        self.scale = options.get("scale", DIM**-0.5)
        self.rows = {}
        self.random = torch.Generator().manual_seed(1)

    def step(self, spans):
        """Largest error over all layers of one step."""
        for rid in spans:
            self.stack.ingest(rid)
            self.rows.setdefault(rid, [(self._rand(0), self._rand(0)) for _ in range(LAYERS)])
        step, ctx = self.stack.step(spans)
        assert self.stack.admit(step, ctx)
        self.stack.plan(step, ctx)
        error = 0.0
        for layer in range(LAYERS):
            total = sum(spans.values())
            q = torch.randn(total, KV_HEADS * GROUP, DIM, generator=self.random)
            k, v = self._rand(total), self._rand(total)
            out = self.attention.run(layer, q, k, v)
            error = max(error, (out - self._expected(layer, spans, q, k, v)).abs().max().item())
        self.stack.commit(step, ctx)
        return error

    def _rand(self, n):
        return torch.randn(n, KV_HEADS, DIM, generator=self.random)

    def _expected(self, layer, spans, q, k, v):
        out, at = [], 0
        for rid, span in spans.items():
            part = slice(at, at + span)
            keys, values = (
                torch.cat([old, new[part]])
                for old, new in zip(self.rows[rid][layer], (k, v), strict=True)
            )
            self.rows[rid][layer] = (keys, values)
            for i in range(span):
                seen = len(keys) - span + i + 1
                for h in range(KV_HEADS * GROUP):
                    ks, vs = (x[:seen, h // GROUP].double() for x in (keys, values))
                    weights = (ks @ q[at + i, h].double() * self.scale).softmax(0)
                    out.append(weights @ vs)
            at += span
        return torch.stack(out).view(-1, KV_HEADS * GROUP, DIM)


def test_prefill_chunks_decode_and_mixtures_agree_with_plain_softmax():
    h = History()
    for spans in (
        {1: 5, 2: 33},
        {1: 1, 2: 1},
        {3: 16, 2: 7, 1: 1},  # a fresh row, a chunk after a prefix, one token
        {3: 1, 4: 1, 1: 1, 2: 1},
        {4: 20},
        {2: 1},
    ):
        assert h.step(spans) < 1e-5
    h.stack.check()


def test_scale_is_an_option():
    h = History(scale=0.25)
    assert h.step({1: 6}) < 1e-5
    assert h.step({1: 1}) < 1e-5


def test_a_long_prompt_needs_no_mask(monkeypatch):
    """Memory of a prefill from position 0 grows with T, not with T × T."""
    masks = []
    real = functional.scaled_dot_product_attention

    def spy(*args, attn_mask=None, **kwargs):
        masks.append(attn_mask)
        return real(*args, attn_mask=attn_mask, **kwargs)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", spy)
    h = History()
    h.step({1: 40, 2: 9})
    assert masks == [None] * 4


def test_neighbours_do_not_matter_beyond_rounding():
    together, alone = History(), History()
    q = torch.randn(2, KV_HEADS * GROUP, DIM)
    k, v = torch.randn(2, 2, KV_HEADS, DIM).unbind(0)
    outs = []
    for h, rids in ((together, {1: 1, 2: 1}), (alone, {1: 1})):
        for rid in rids:
            h.stack.ingest(rid)
        if h is together:
            h.step({2: 100})
        step, ctx = h.stack.step(rids)
        assert h.stack.admit(step, ctx)
        h.stack.plan(step, ctx)
        n = len(rids)
        outs.append(h.attention.run(0, q[:n], k[:n], v[:n])[0])
    assert torch.allclose(*outs, atol=1e-6)


def test_it_needs_one_pool_and_a_planned_step():
    with pytest.raises(ValueError, match="depends on one paged_kv, got 0"):
        SdpaAttention(context("attention"))
    with pytest.raises(Bug, match="outside a planned step"):
        History().attention.run(0, *torch.zeros(3, 1, 2, 8))
