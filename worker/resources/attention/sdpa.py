"""sdpa_attention: attention over paged keys and values by torch's scaled_dot_product_attention.

Decode gathers every row's pages side by side and masks beyond its length: one call a layer. A
prefill goes row by row, because rows are ragged: from position 0 it attends over the step's own
keys and values, causally and without a mask; a later chunk gathers the pages before it.

Legend: T tokens, B rows, L keys of a row, H query heads, K kv heads, G = H / K, D head size.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from protocol.errors import Bug
from worker.api.handles import KvPlan
from worker.api.inputs import ResourceStep, StepContext
from worker.resources.base import Resource, ResourceContext
from worker.resources.kv.paged import PagedKv


@dataclass(frozen=True, slots=True)
class RowPlan:
    """Where one row lies in T, and how many keys it has; `mask` [span, L] where one is needed."""

    first: int
    span: int
    keys: int
    pages: torch.Tensor | None  # None: the step's own keys are all it has
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Decode: `pages` [B * Pmax] and `mask` [B, 1, 1, Pmax * page_tokens]. Else: `rows`."""

    kv: KvPlan
    pages: torch.Tensor | None = None
    mask: torch.Tensor | None = None
    rows: tuple[RowPlan, ...] = ()


class SdpaAttention(Resource):
    """Depends on one `paged_kv`. Options: `scale` (default: head_dim ** -0.5)."""

    options_known = frozenset({"scale"})

    def __init__(self, context: ResourceContext) -> None:
        super().__init__(context)
        pools = [r for r in context.depends_on.values() if isinstance(r, PagedKv)]
        if len(pools) != 1:
            raise ValueError(
                f"resource {self.key!r}: sdpa_attention depends on one paged_kv, got {len(pools)}"
            )
        self.kv = pools[0]
        self.scale: float | None = context.options.get("scale")
        self._plan: AttentionPlan | None = None
        self._counting = torch.arange(0, device=context.device)

    def plan(
        self, step: ResourceStep, ctx: StepContext, plan_results: Mapping[str, Any]
    ) -> AttentionPlan:
        kv: KvPlan = plan_results[self.kv.key]
        if kv.decode:
            b, width = kv.page_table.shape
            mask = self._count(width * self.kv.page_tokens) < kv.lengths[:, None]
            self._plan = AttentionPlan(kv, kv.page_table.reshape(-1), mask.view(b, 1, 1, -1))
        else:
            self._plan = AttentionPlan(kv, rows=tuple(self._row_plans(kv)))
        return self._plan

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        self._plan = None

    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        self._plan = None

    def cleanup(self) -> None:
        self._plan = None

    # ---- handle (worker.api.handles.AttentionHandle)

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        plan = self._plan
        if plan is None:
            raise Bug(f"resource {self.key!r} is used outside a planned step")
        self.kv.write(layer, k, v)
        return (
            self._decode(layer, q, plan) if plan.kv.decode else self._ragged(layer, q, k, v, plan)
        )

    def _decode(self, layer: int, q_THD: torch.Tensor, plan: AttentionPlan) -> torch.Tensor:
        assert plan.pages is not None
        b, heads, d = q_THD.shape
        keys = self.kv.keys(layer)
        kv_heads = keys.shape[2]
        k = keys.index_select(0, plan.pages).view(b, -1, kv_heads, d)
        v = self.kv.values(layer).index_select(0, plan.pages).view(b, -1, kv_heads, d)
        out_BKGD = functional.scaled_dot_product_attention(
            q_THD.view(b, kv_heads, heads // kv_heads, d),
            k.transpose(1, 2).to(q_THD.dtype),
            v.transpose(1, 2).to(q_THD.dtype),
            attn_mask=plan.mask,
            scale=self.scale,
        )
        return out_BKGD.reshape(b, heads, d)

    def _ragged(
        self,
        layer: int,
        q_THD: torch.Tensor,
        k_TKD: torch.Tensor,
        v_TKD: torch.Tensor,
        plan: AttentionPlan,
    ) -> torch.Tensor:
        out = torch.empty_like(q_THD, memory_format=torch.contiguous_format)
        for r in plan.rows:
            part = slice(r.first, r.first + r.span)
            if r.pages is None:
                k, v = k_TKD[part], v_TKD[part]
            else:
                k = self.kv.keys(layer).index_select(0, r.pages).flatten(0, 1)[: r.keys]
                v = self.kv.values(layer).index_select(0, r.pages).flatten(0, 1)[: r.keys]
            out[part] = self._attend(q_THD[part], k, v, r)
        return out

    def _attend(
        self, q_LHD: torch.Tensor, k_LKD: torch.Tensor, v_LKD: torch.Tensor, row: RowPlan
    ) -> torch.Tensor:
        """One row's query heads over its kv heads; the G heads of a group share keys unexpanded."""
        n, heads, d = q_LHD.shape
        kv_heads = k_LKD.shape[1]
        group = heads // kv_heads
        q_KGLD = q_LHD.view(n, kv_heads, group, d).permute(1, 2, 0, 3)
        k_KGLD, v_KGLD = (
            t.permute(1, 0, 2).unsqueeze(1).expand(-1, group, -1, -1).to(q_LHD.dtype)
            for t in (k_LKD, v_LKD)
        )
        out_KGLD = functional.scaled_dot_product_attention(
            q_KGLD,
            k_KGLD,
            v_KGLD,
            attn_mask=row.mask,
            is_causal=row.mask is None and row.span > 1,
            scale=self.scale,
        )
        return out_KGLD.permute(2, 0, 1, 3).reshape(n, heads, d)

    # ---- inside

    def _count(self, n: int) -> torch.Tensor:
        """0 … n - 1 on the device; made by the device, kept, only ever grows."""
        if len(self._counting) < n:
            self._counting = torch.arange(2 * n, device=self.context.device)
        return self._counting[:n]

    def _row_plans(self, kv: KvPlan) -> list[RowPlan]:
        rows: list[RowPlan] = []
        first = 0
        for i, (start, span) in enumerate(zip(kv.starts, kv.spans, strict=True)):
            keys = start + span
            pages = mask = None
            if start:
                pages = kv.page_table[i, : -(-keys // self.kv.page_tokens)]
                if span > 1:
                    mask = self._count(keys)[None] <= self._count(keys)[start:, None]
            rows.append(RowPlan(first, span, keys, pages, mask))
            first += span
        return rows
