"""paged_kv: keys and values in pages; every request has named streams of them (labels).

Host state per stream: its length, how many pages it holds, and its page table. A stream holds
more pages than its length needs only between `admit` and `commit`; so what a step reserved is
always known from the two numbers, and rollback needs no journal.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from protocol.errors import Bug, InvariantViolation
from worker.api.handles import KvPlan
from worker.api.inputs import RequestInfo, ResourceStep, StepContext
from worker.resources.base import (
    ADMITTED,
    AdmitFailedReason,
    AdmitOutcome,
    Resource,
    ResourceContext,
    ResourceReqConfig,
)
from worker.resources.kv.pages import SINK, Ints, PagePool
from worker.resources.slot_table import Rows, SlotTable
from worker.resources.upload import upload

StreamKey = tuple[int, str]


class PagedKv(Resource):
    """Options: `layers`, `kv_heads`, `head_dim`, `pages` (for requests; the sink comes on top),
    `page_tokens` (16), `dtype` (the context's), `labels` (("main",)), `values` (True; False keeps
    keys only), `context` (most tokens of a request; 0: unbounded), `default_pages` (read by the
    engine: the pool's size where the configuration names none)."""

    options_known = frozenset(
        {"layers", "kv_heads", "head_dim", "pages", "page_tokens", "dtype", "labels", "values"}
        | {"context", "default_pages"}
    )
    pooled = True

    @classmethod
    def page_bytes(cls, options: Mapping[str, Any], dtype: torch.dtype) -> int:
        sides = 2 if options.get("values", True) else 1
        per_token = options["layers"] * sides * options["kv_heads"] * options["head_dim"]
        kept = options.get("dtype") or dtype
        return int(per_token * options.get("page_tokens", 16) * kept.itemsize)

    def __init__(self, context: ResourceContext) -> None:
        super().__init__(context)
        o = context.options
        self.page_tokens = int(o.get("page_tokens", 16))
        self.layers = int(o["layers"])
        self.labels: tuple[str, ...] = tuple(o.get("labels", ("main",)))
        self.context_tokens = int(o.get("context", 0))
        self.pool = PagePool(int(o["pages"]))
        self.sides = 2 if o.get("values", True) else 1
        page = (self.page_tokens, int(o["kv_heads"]), int(o["head_dim"]))
        # One allocation, so that a fresh page is cleared in all layers by one kernel; a layer's
        # keys and its values are each a contiguous view. Zeros: masked scores may not meet NaN.
        self.storage = torch.zeros(
            (self.layers * self.sides, self.pool.total, *page),
            dtype=o.get("dtype") or context.dtype,
            device=context.device,
        )
        self._keys = [self.storage[i * self.sides] for i in range(self.layers)]
        self._values = list(self.storage[1::2]) if self.sides == 2 else []
        self._flat = [t.view(-1, *page[1:]) for t in self._keys]
        self._flat_values = [t.view(-1, *page[1:]) for t in self._values]
        self._streams: SlotTable[StreamKey] = SlotTable()
        self._streams.add_column("length", np.int64)
        self._streams.add_column("held", np.int64)
        self._streams.add_column("table", np.int64, width=8)
        self._params: dict[int, Mapping[str, Any]] = {}
        self._members = 0  # raised when a stream comes or goes
        self._tables = 0  # raised when any page table changes
        self._rows_kept: Rows | None = None
        self._table_kept: tuple[Rows, int, int, torch.Tensor] | None = None
        self._plan: KvPlan | None = None

    # ---- handle (worker.api.handles.KvHandle)

    def keys(self, layer: int) -> torch.Tensor:
        return self._keys[layer]

    def values(self, layer: int) -> torch.Tensor:
        if self.sides == 1:
            raise ValueError(f"resource {self.key!r} keeps keys only (option values: False)")
        return self._values[layer]

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        slots = self.plan_of_step().slots
        self._flat[layer].index_copy_(0, slots, k.to(self.storage.dtype))
        if v is not None:
            self.values(layer)
            self._flat_values[layer].index_copy_(0, slots, v.to(self.storage.dtype))

    def plan_of_step(self) -> KvPlan:
        if self._plan is None:
            raise Bug(f"resource {self.key!r} is used outside a planned step")
        return self._plan

    # ---- a request's life

    def ingest_request(self, request_id: int, overrides: ResourceReqConfig | None) -> None:
        if request_id not in self._params:
            self._params[request_id] = overrides.options if overrides else {}
            for label in self.labels:
                self._streams.acquire((request_id, label))
            self._members += 1

    def remove_request(self, request_id: int) -> None:
        if self._params.pop(request_id, None) is not None:
            for label in self.labels:
                self._give_all((request_id, label))
                self._streams.release((request_id, label))
            self._members += 1

    def reset_request(self, request_id: int) -> None:
        if request_id in self._params:
            for label in self.labels:
                self._give_all((request_id, label))

    def _give_all(self, key: StreamKey) -> None:
        slot = self._streams.get(key)
        if slot is not None:
            self._shrink(np.array([slot]), np.array([0]))
            self._streams.column("length")[slot] = 0

    # ---- a step

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        rows = self._rows(step)
        refusal = None if ctx.steady else self._refuse_for_ever(step, ctx)
        if refusal is not None:
            return refusal
        length = self._streams.column("length")[rows.slots]
        held = self._streams.column("held")[rows.slots]
        need = np.maximum(self._pages(length + rows.spans) - held, 0)
        total = int(need.sum())
        if total == 0:
            return ADMITTED
        if total > self.pool.free:
            return AdmitOutcome(
                ok=False,
                ready=False,
                reason=AdmitFailedReason.OUT_OF_SPACE,
                detail=f"needs {total} pages, {self.pool.free} free of {self.pool.usable}",
            )
        self._streams.widen("table", int((held + need).max()))
        slots, columns = self._cells(rows.slots, held, need)
        self._streams.column("table")[slots, columns] = self.pool.take(total)
        self._streams.column("held")[rows.slots] = held + need
        self._tables += 1
        return ADMITTED

    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        known = [s for s in step.segments if (s.request_id, s.label) in self._streams]
        slots = self._streams.index((s.request_id, s.label) for s in known)
        self._shrink(slots, self._pages(self._streams.column("length")[slots]))
        self._plan = None

    def plan(self, step: ResourceStep, ctx: StepContext, plan_results: Mapping[str, Any]) -> KvPlan:
        rows = self._rows(step)
        table = self._streams.column("table")
        length: Ints = self._streams.column("length")[rows.slots]
        after = length + rows.spans
        size = self.page_tokens
        if rows.decode:
            slots, positions = rows.slots, length
        else:
            slots, positions = self._cells(rows.slots, length, rows.spans)
        places = table[slots, positions // size] * size + positions % size
        width = int(self._pages(after).max(initial=1))
        kept = self._table_kept
        if kept is not None and kept[:3] == (rows, self._tables, width):
            page_table = kept[3]
            places_t, after_t, positions_t = self._upload(places, after, positions)
        else:
            places_t, after_t, positions_t, page_table = self._upload(
                places, after, positions, table[rows.slots, :width]
            )
            self._table_kept = (rows, self._tables, width, page_table)
        self._clear_fresh(rows.slots, length, after)
        self._plan = KvPlan(
            page_table=page_table,
            slots=places_t,
            lengths=after_t,
            positions=positions_t,
            starts=length.tolist(),
            spans=rows.spans_list,
            decode=rows.decode,
        )
        return self._plan

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        rows = self._rows(step)
        self._streams.column("length")[rows.slots] += rows.spans
        self._plan = None

    # ---- engine level

    def post_warmup_validate(self) -> None:
        self.check()
        if self.pool.free != self.pool.usable:
            raise InvariantViolation(
                f"resource {self.key!r}: {self.pool.usable - self.pool.free} pages still held "
                "after warm-up"
            )

    def check(self) -> None:
        slots = self._streams.used()
        held, length = (self._streams.column(n)[slots] for n in ("held", "length"))
        table = self._streams.column("table")
        live = np.arange(table.shape[1]) < held[:, None]
        self.pool.check(table[slots][live])
        if (held < self._pages(length)).any():
            raise InvariantViolation(f"resource {self.key!r}: a stream is longer than its pages")
        if (table[slots][~live] != SINK).any():
            raise InvariantViolation(f"resource {self.key!r}: a page table names a page given back")

    def snapshot(self) -> Any:
        """Free pages in order, and each stream's length and pages."""
        streams = {}
        for key, slot in self._streams.items():
            held = int(self._streams.column("held")[slot])
            pages = self._streams.column("table")[slot, :held].tolist()
            streams[key] = (int(self._streams.column("length")[slot]), pages)
        return self.pool.free_pages().tolist(), streams

    def statistics(self) -> dict[str, int | float]:
        return {
            "pages_total": self.pool.usable,
            "pages_free": self.pool.free,
            "pages_used": self.pool.usable - self.pool.free,
            "streams": len(self._streams),
        }

    def cleanup(self) -> None:
        self.storage = torch.empty(0)
        self._keys, self._values, self._flat, self._flat_values = [], [], [], []
        self._plan = self._table_kept = None

    # ---- inside

    def _pages(self, tokens: Ints) -> Ints:
        return (tokens + self.page_tokens - 1) // self.page_tokens

    def _upload(self, *arrays: Ints) -> list[torch.Tensor]:
        return upload(arrays, self.context.device)

    def _rows(self, step: ResourceStep) -> Rows:
        kept = self._rows_kept
        if kept is None or kept.segments is not step.segments or kept.version != self._members:
            kept = Rows(step.segments, self._index(step.segments), self._members)
            self._rows_kept = kept
        return kept

    def _index(self, segments: Sequence[Any]) -> Ints:
        try:
            slots = self._streams.index((s.request_id, s.label) for s in segments)
        except KeyError as e:
            raise Bug(
                f"resource {self.key!r}: no stream {e.args[0]!r}; labels: {self.labels}"
            ) from e
        if len(set(slots.tolist())) != len(slots):
            raise Bug(f"resource {self.key!r}: a stream appears twice in one step")
        return slots

    @staticmethod
    def _cells(slots: Ints, start: Ints, count: Ints) -> tuple[Ints, Ints]:
        """Row-major (slot, column) pairs: for each row, columns start … start + count - 1."""
        before = np.cumsum(count) - count
        columns = np.arange(int(count.sum())) + np.repeat(start - before, count)
        return np.repeat(slots, count), columns

    def _shrink(self, slots: Ints, keep: Ints) -> None:
        """Give back all pages beyond `keep` of each stream, the last taken first."""
        held = self._streams.column("held")
        rows, columns = self._cells(slots, keep, np.maximum(held[slots] - keep, 0))
        if len(rows):
            table = self._streams.column("table")
            self.pool.give(table[rows, columns])
            table[rows, columns] = SINK
            held[slots] = np.minimum(held[slots], keep)
            self._tables += 1

    def _clear_fresh(self, slots: Ints, length: Ints, after: Ints) -> None:
        """Zero the pages that are new in this step and that it will not fill.

        Attention reads whole pages and masks the tail, but a NaN survives the mask: without this,
        what one request left in a page would reach the next one that gets it.
        """
        first_new = self._pages(length)
        last = after // self.page_tokens
        partial = (after % self.page_tokens != 0) & (last >= first_new)
        if partial.any():
            pages = self._streams.column("table")[slots[partial], last[partial]]
            (pages_t,) = self._upload(pages)
            self.storage.index_fill_(1, pages_t, 0)

    def _refuse_for_ever(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome | None:
        """Refuse a request whose host tokens leave a gap, or that could never fit."""
        infos = {i.request_id: i for i in ctx.infos if len(i.tokens)}
        if not infos:
            return None
        length = self._streams.column("length")
        for s in step.segments:
            info = infos.get(s.request_id)
            slot = self._streams.get((s.request_id, s.label))
            if info is None or slot is None:
                continue
            at = int(length[slot])
            if info.position != at:
                error = Bug(
                    f"request {s.request_id}: tokens from position {info.position} on do not "
                    f"continue the {at} that {self.key!r} holds"
                )
                return AdmitOutcome(
                    False, False, AdmitFailedReason.TERMINAL, str(error), s.request_id, error
                )
            pages = self._most_pages(at + s.span, info)
            if pages > self.pool.usable:
                return AdmitOutcome(
                    ok=False,
                    ready=False,
                    reason=AdmitFailedReason.TERMINAL,
                    detail=f"needs up to {pages} pages of {self.page_tokens} tokens, "
                    f"the pool has {self.pool.usable}",
                    request_id=s.request_id,
                )
        return None

    def _most_pages(self, tokens: int, info: RequestInfo) -> int:
        """Pages for `tokens` and the outputs that may follow; the last output is never stored."""
        max_tokens = int(self._params[info.request_id].get("max_tokens") or 0)
        most = tokens + max(0, max_tokens - info.output_position - 1)
        if self.context_tokens:
            most = max(tokens, min(most, self.context_tokens))
        return -(-most // self.page_tokens)
