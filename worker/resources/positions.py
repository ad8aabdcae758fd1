"""positions: each token's position in its request, known to the host and planned to the device.

With a `paged_kv` among its dependencies the count is that pool's, which is one truth and one copy
less; else it counts for itself.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from worker.api.handles import KvPlan, PositionsPlan
from worker.api.inputs import ResourceStep, StepContext
from worker.resources.base import Resource, ResourceContext, ResourceReqConfig
from worker.resources.kv.paged import PagedKv
from worker.resources.slot_table import Rows, SlotTable
from worker.resources.upload import upload


class Positions(Resource):
    """Plan: `PositionsPlan`, [T] int64. No options."""

    def __init__(self, context: ResourceContext) -> None:
        super().__init__(context)
        pools = [r for r in context.depends_on.values() if isinstance(r, PagedKv)]
        self._kv = pools[0] if pools else None
        self._counts: SlotTable[int] = SlotTable()
        self._counts.add_column("length", np.int64)
        self._members = 0
        self._rows_kept: Rows | None = None

    def ingest_request(self, request_id: int, overrides: ResourceReqConfig | None) -> None:
        if request_id not in self._counts:
            self._counts.acquire(request_id)
            self._members += 1

    def remove_request(self, request_id: int) -> None:
        if self._counts.release(request_id) is not None:
            self._members += 1

    def reset_request(self, request_id: int) -> None:
        slot = self._counts.get(request_id)
        if slot is not None:
            self._counts.column("length")[slot] = 0

    def plan(
        self, step: ResourceStep, ctx: StepContext, plan_results: Mapping[str, Any]
    ) -> PositionsPlan:
        if self._kv is not None:
            kv: KvPlan = plan_results[self._kv.key]
            return kv.positions
        rows = self._rows(step)
        length = self._counts.column("length")[rows.slots]
        before = np.cumsum(rows.spans) - rows.spans
        positions = np.arange(rows.tokens) + np.repeat(length - before, rows.spans)
        (planned,) = upload([positions], self.context.device)
        return planned

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        if self._kv is None:
            rows = self._rows(step)
            self._counts.column("length")[rows.slots] += rows.spans

    def snapshot(self) -> Any:
        length = self._counts.column("length")
        return {r: int(length[slot]) for r, slot in self._counts.items()}

    def statistics(self) -> dict[str, int | float]:
        return {"requests": len(self._counts)}

    def _rows(self, step: ResourceStep) -> Rows:
        kept = self._rows_kept
        if kept is None or kept.segments is not step.segments or kept.version != self._members:
            slots = self._counts.index(s.request_id for s in step.segments)
            kept = self._rows_kept = Rows(step.segments, slots, self._members)
        return kept
