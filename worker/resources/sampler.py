"""sampler: chooses tokens, and keeps each request's last one on the device for the next step.

A token is written to the `last_token` column at commit, not when it is sampled: a forward that
raises after it sampled leaves no trace, and the step can be tried again.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from protocol.errors import Bug
from worker.api.handles import SamplerPlan
from worker.api.inputs import RequestInfo, ResourceStep, StepContext
from worker.resources.base import Resource, ResourceContext, ResourceReqConfig
from worker.resources.random_draws import gumbel_noise, row_keys
from worker.resources.slot_table import Ints, Rows, SlotTable
from worker.resources.upload import upload

GREEDY_BELOW = 1e-3
"""Temperatures below this, 0 too, take the best token: dividing by them would overflow."""


@dataclass(frozen=True, slots=True)
class Draws:
    """Parameters of the S rows, [S] each; `filtered` [F]: rows that ask for top-k or top-p.

    `any_greedy`: some row takes its best token, which `temperature` 0 marks.
    """

    low: torch.Tensor
    high: torch.Tensor
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    filtered: torch.Tensor | None
    any_greedy: bool


@dataclass(frozen=True, slots=True)
class StepPlan(SamplerPlan):
    slots: torch.Tensor  # [B], every row's
    sampling_slots: torch.Tensor  # [S]
    draws: Draws | None  # None: every row that samples is greedy


class Sampler(Resource):
    """Option: `vocab` (checked against the logits). Request parameters: `temperature` (0: greedy),
    `top_k` (0: off), `top_p` (1: off), `seed` (any integer, taken modulo 2 ** 64). A step's draws
    use `info.output_position`."""

    options_known = frozenset({"vocab"})

    def __init__(self, context: ResourceContext) -> None:
        super().__init__(context)
        self.vocab: int | None = context.options.get("vocab")
        self._table: SlotTable[int] = SlotTable()
        for name, dtype in (
            ("temperature", np.float32),
            ("top_k", np.int32),
            ("top_p", np.float32),
            ("seed", np.uint64),
        ):
            self._table.add_column(name, dtype)
        self.last_token = torch.zeros(
            self._table.capacity, dtype=torch.int64, device=context.device
        )
        self._members = 0
        self._rows_kept: Rows | None = None
        self._slots_kept: tuple[Rows, torch.Tensor] | None = None
        self._plan: StepPlan | None = None
        self._chosen: torch.Tensor | None = None

    # ---- a request's life

    def ingest_request(self, request_id: int, overrides: ResourceReqConfig | None) -> None:
        if request_id in self._table:
            return
        o = overrides.options if overrides else {}
        temperature, top_p = float(o.get("temperature") or 0.0), o.get("top_p")
        top_p, top_k = 1.0 if top_p is None else float(top_p), int(o.get("top_k") or 0)
        if not (0.0 <= temperature < float("inf") and 0.0 <= top_p <= 1.0):
            raise ValueError(f"temperature {temperature} or top_p {top_p} is out of range")
        slot = self._table.acquire(request_id)
        if self._table.capacity > len(self.last_token):
            more = self._table.capacity - len(self.last_token)
            self.last_token = torch.cat([self.last_token, self.last_token.new_zeros(more)])
        set_to = {
            "temperature": temperature if temperature >= GREEDY_BELOW else 0.0,
            "top_k": min(max(top_k, 0), 2**31 - 1),
            "top_p": top_p,
            "seed": int(o.get("seed") or 0) % 2**64,
        }
        for name, value in set_to.items():
            self._table.column(name)[slot] = value
        self._members += 1

    def remove_request(self, request_id: int) -> None:
        if self._table.release(request_id) is not None:
            self._members += 1

    # ---- a step

    def plan(
        self, step: ResourceStep, ctx: StepContext, plan_results: Mapping[str, Any]
    ) -> SamplerPlan:
        rows = self._rows(step)
        slots = self._device_slots(rows)
        samples = [i for i, info in enumerate(ctx.infos) if info.samples]
        everyone = len(samples) == len(rows.segments)
        index = np.array(samples, np.int64)
        host_slots = rows.slots if everyone else rows.slots[index]
        last_index, sampling_slots = None, slots
        if not (everyone and rows.decode):
            ends = np.cumsum(rows.spans) - 1
            last_index, sampling_slots = upload([ends[index], host_slots], self.context.device)
        self._chosen = None
        self._plan = StepPlan(
            request_ids=rows.request_ids if everyone else [rows.request_ids[i] for i in samples],
            last_index=last_index,
            slots=slots,
            sampling_slots=sampling_slots,
            draws=self._draws(host_slots, samples, ctx.infos),
        )
        return self._plan

    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        self._plan = self._chosen = None

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        plan = self._planned()
        if self._chosen is None and plan.request_ids:
            raise Bug(f"sampler: {len(plan.request_ids)} rows sample, the forward chose no token")
        if self._chosen is not None:
            self.last_token.index_copy_(0, plan.sampling_slots, self._chosen)
        self._plan = self._chosen = None

    # ---- handle (worker.api.handles.SamplerHandle)

    @property
    def request_ids(self) -> Sequence[int]:
        return self._planned().request_ids

    def last_tokens(self) -> torch.Tensor:
        return self.last_token.index_select(0, self._planned().slots)

    def last_rows(self, x: torch.Tensor) -> torch.Tensor:
        index = self._planned().last_index
        return x if index is None else x.index_select(0, index)

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        plan = self._planned()
        rows, vocab = logits.shape
        if rows != len(plan.request_ids) or vocab != (self.vocab or vocab):
            raise ValueError(
                f"sampler: logits [{rows}, {vocab}] for {len(plan.request_ids)} rows that sample "
                f"and a vocabulary of {self.vocab or vocab}"
            )
        if not plan.request_ids:
            return self.accept(torch.zeros(0, dtype=torch.int64, device=logits.device))
        if plan.draws is None:
            return self.accept(logits.argmax(-1))
        return self.accept(draw(logits, plan.draws))

    def accept(self, tokens: torch.Tensor) -> torch.Tensor:
        if self._chosen is not None:
            raise Bug("sampler: a second sample or accept in one step")
        if tokens.shape != (len(self._planned().request_ids),):
            raise ValueError(
                f"sampler: tokens of shape {tuple(tokens.shape)}, "
                f"{len(self._planned().request_ids)} rows sample"
            )
        self._chosen = tokens
        return tokens

    # ---- engine level

    def snapshot(self) -> Any:
        """Each request's last token."""
        last = self.last_token.tolist()
        return {r: last[slot] for r, slot in self._table.items()}

    def statistics(self) -> dict[str, int | float]:
        return {"requests": len(self._table)}

    def cleanup(self) -> None:
        self.last_token = torch.empty(0, dtype=torch.int64)
        self._plan = self._chosen = self._slots_kept = None

    # ---- inside

    def _planned(self) -> StepPlan:
        if self._plan is None:
            raise Bug(f"resource {self.key!r} is used outside a planned step")
        return self._plan

    def _rows(self, step: ResourceStep) -> Rows:
        kept = self._rows_kept
        if kept is None or kept.segments is not step.segments or kept.version != self._members:
            slots = self._table.index(s.request_id for s in step.segments)
            kept = self._rows_kept = Rows(step.segments, slots, self._members)
        return kept

    def _device_slots(self, rows: Rows) -> torch.Tensor:
        if self._slots_kept is None or self._slots_kept[0] is not rows:
            (slots,) = upload([rows.slots.copy()], self.context.device)
            self._slots_kept = (rows, slots)
        return self._slots_kept[1]

    def _draws(
        self, slots: Ints, samples: Sequence[int], infos: Sequence[RequestInfo]
    ) -> Draws | None:
        temperature = self._table.column("temperature")[slots]
        greedy = temperature == 0
        if greedy.all():
            return None
        top_k, top_p = (self._table.column(n)[slots] for n in ("top_k", "top_p"))
        positions = [infos[i].output_position for i in samples]
        low, high = row_keys(self._table.column("seed")[slots], positions)
        filtered = np.flatnonzero(((top_k > 0) | (top_p < 1)) & ~greedy).astype(np.int32)
        floats = [f.view(np.int32) for f in (temperature, top_p)]
        low_t, high_t, temp_t, top_p_t, top_k_t, filtered_t = upload(
            [low, high, *floats, top_k, filtered], self.context.device
        )
        return Draws(
            low=low_t,
            high=high_t,
            temperature=temp_t.view(torch.float32),
            top_k=top_k_t,
            top_p=top_p_t.view(torch.float32),
            filtered=filtered_t if len(filtered) else None,
            any_greedy=bool(greedy.any()),
        )


def draw(logits_SV: torch.Tensor, draws: Draws) -> torch.Tensor:
    """[S] int64: one draw a row from softmax(filtered logits / temperature), by Gumbel noise."""
    temperature = draws.temperature[:, None]
    greedy = temperature == 0
    scores = logits_SV.to(torch.float32) / torch.where(greedy, 1.0, temperature)
    if draws.filtered is not None:
        rows = draws.filtered
        kept = filter_scores(*(t.index_select(0, rows) for t in (scores, draws.top_k, draws.top_p)))
        scores = scores.index_copy(0, rows.long(), kept)
    scores += gumbel_noise(draws.low, draws.high, scores.shape[1])
    tokens = scores.argmax(-1)
    if draws.any_greedy:
        tokens = torch.where(greedy[:, 0], logits_SV.argmax(-1), tokens)
    return tokens


def filter_scores(
    scores_FV: torch.Tensor, top_k_F: torch.Tensor, top_p_F: torch.Tensor
) -> torch.Tensor:
    """Scores with all but the allowed tokens at -inf.

    top-k first (0: all), then of what is left the smallest set of best tokens whose probability
    reaches top-p; the best token always stays. Of equal scores the lower index counts as better.
    """
    best, index = scores_FV.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores_FV.shape[1], device=scores_FV.device)[None]
    k = top_k_F[:, None]
    best = best.masked_fill((k > 0) & (rank >= k), float("-inf"))
    probability = best.softmax(-1, dtype=torch.float64)
    before = probability.cumsum(-1) - probability
    best = best.masked_fill((before >= top_p_F[:, None]) & (rank > 0), float("-inf"))
    return torch.empty_like(scores_FV).scatter_(1, index, best)
