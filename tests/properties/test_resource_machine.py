"""Pages and admission transactions (E16, P16), through the engine's StepRunner over every kind.

One node owns a paged KV pool with two labels, attention, positions of both sorts, a sampler, and
last a resource that refuses or raises on demand. Steps are admitted, planned, committed and rolled
back in any order the engine could, several of them admitted at once (E14).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from hypothesis.stateful import run_state_machine_as_test as run_machine

from protocol.errors import PodiumError
from tests.support.budget import budget, hunt
from tests.support.resource_contract import PARAMS, context
from worker.api.inputs import RequestInfo, ResourceStep, Segment, StepContext, SubmoduleStep
from worker.engine.step_runner import StepRunner
from worker.resources.attention.sdpa import SdpaAttention
from worker.resources.base import (
    ADMITTED,
    AdmitFailedReason,
    AdmitOutcome,
    Resource,
    ResourceReqConfig,
)
from worker.resources.kv.paged import PagedKv
from worker.resources.positions import Positions
from worker.resources.registry import KINDS
from worker.resources.sampler import Sampler

PAGES, PAGE = 9, 16
NODE = "n"
LABELS = ("main", "draft")
rids = st.integers(1, 6)
spans = st.dictionaries(rids, st.integers(1, 40), min_size=1, max_size=3)


class Moody(Resource):
    """Reserves one for each row, or refuses, or raises."""

    def __init__(self, key: str) -> None:
        super().__init__(context(key))
        self.mood = ""
        self.reserved: list[tuple[int, ...]] = []

    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        if self.mood == "raise":
            raise RuntimeError("moody")
        if self.mood == "refuse":
            return AdmitOutcome(False, False, AdmitFailedReason.OUT_OF_SPACE, "moody")
        rows = tuple(ctx.request_ids)
        if rows not in self.reserved:
            self.reserved.append(rows)
        return ADMITTED

    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        rows = tuple(ctx.request_ids)
        if rows in self.reserved:
            self.reserved.remove(rows)

    commit = rollback

    def snapshot(self) -> Any:
        return list(self.reserved)


@dataclass
class Admitted:
    step: SubmoduleStep
    ctx: StepContext
    spans: dict[int, int]
    planned: bool = False
    void: bool = False  # one of its requests was removed: it can only be rolled back


class Resources(RuleBasedStateMachine):
    """`make_pool`, `make_runner`: for tests that plant a bug."""

    make_pool: Callable[..., PagedKv] = PagedKv
    make_runner: Callable[[], StepRunner] = StepRunner

    @initialize()
    def start(self) -> None:
        pool = {"layers": 1, "kv_heads": 1, "head_dim": 2, "pages": PAGES, "labels": LABELS}
        kv = type(self).make_pool(context("kv", **pool))
        self.moody = Moody("moody")
        self.resources: list[Resource] = [
            kv,
            SdpaAttention(context("attention", kv)),
            Positions(context("positions", kv)),
            Positions(context("own_positions")),
            Sampler(context("sampler")),
            self.moody,
        ]
        assert {type(r) for r in self.resources} >= set(KINDS.values()), "a kind is missing here"
        self.kv = kv
        self.runner = type(self).make_runner()
        self.runner.register(NODE, {r.key: r for r in self.resources})
        self.lengths: dict[int, int] = {}
        self.admitted: list[Admitted] = []
        self.empty = self.snapshot()

    # ---- requests

    @rule(rid=rids)
    def ingest(self, rid: int) -> None:
        for r in self.resources:
            r.ingest_request(rid, ResourceReqConfig(PARAMS))
        self.lengths.setdefault(rid, 0)

    @rule(rid=rids)
    def remove(self, rid: int) -> None:
        for r in reversed(self.resources):
            r.remove_request(rid)
        self.lengths.pop(rid, None)
        for a in self.admitted:
            a.void = a.void or rid in a.spans

    @rule(rid=rids)
    def reset(self, rid: int) -> None:
        """Preemption by recompute: between steps only."""
        if rid in self.lengths and not self.in_a_step(rid):
            for r in self.resources:
                r.reset_request(rid)
            self.lengths[rid] = 0

    # ---- steps

    @rule(asked=spans, both=st.booleans(), mood=st.sampled_from(["", "", "", "refuse", "raise"]))
    def admit(self, asked: dict[int, int], both: bool, mood: str) -> None:
        free = {r: n for r, n in asked.items() if r in self.lengths and not self.in_a_step(r)}
        if not free:
            return
        step, ctx = self.declare(free, both)
        before = self.snapshot()
        self.moody.mood = mood
        try:
            ok = self.runner.admit(NODE, step, ctx).outcome.ok
        except RuntimeError:
            ok = False
        finally:
            self.moody.mood = ""
        if not ok:
            assert self.snapshot() == before, "refused, yet changed"
            return
        assert not mood
        self.admitted.append(Admitted(step, ctx, free))

    @rule(asked=spans, both=st.booleans())
    def admit_and_think_better_of_it(self, asked: dict[int, int], both: bool) -> None:
        before, known = self.snapshot(), len(self.admitted)
        self.admit(asked, both, "")
        if len(self.admitted) > known:
            a = self.admitted.pop()
            for _ in range(2):
                self.runner.rollback(NODE, a.step, a.ctx)
                assert self.snapshot() == before, "rolled back, yet changed"

    @rule(which=st.integers(0, 3))
    def admit_again(self, which: int) -> None:
        a = self.take(which)
        if a is not None and not a.void:
            before = self.snapshot()
            assert self.runner.admit(NODE, a.step, a.ctx).outcome.ok
            assert self.snapshot() == before, "an unchanged step reserved something twice"

    @rule(which=st.integers(0, 3))
    def commit(self, which: int) -> None:
        a = self.take(which)
        if a is None or a.void:
            return
        plans = self.runner.plan(NODE, a.step, a.ctx)
        self.check_plan(a, plans)
        sampler = self.resources[4]
        assert isinstance(sampler, Sampler)
        sampler.accept(torch.arange(len(a.ctx.request_ids)))
        self.runner.commit(NODE, a.step, a.ctx)
        self.admitted.remove(a)
        for rid, n in a.spans.items():
            self.lengths[rid] += n

    @rule(which=st.integers(0, 3), plan=st.booleans())
    def roll_back(self, which: int, plan: bool) -> None:
        a = self.take(which)
        if a is None:
            return
        if plan and not a.void:
            self.runner.plan(NODE, a.step, a.ctx)  # its forward raised
        self.runner.rollback(NODE, a.step, a.ctx)
        self.admitted.remove(a)

    # ---- what always holds

    @invariant()
    def pages_add_up(self) -> None:
        if not hasattr(self, "kv"):
            return
        for r in self.resources:
            r.check()
        figures = self.kv.statistics()
        assert figures["pages_free"] + figures["pages_used"] == PAGES
        used = self.kv.snapshot()[1]
        assert self.resources[3].snapshot() == self.lengths, "positions of its own"
        assert {k[0] for k in used} == self.lengths.keys()
        for (rid, label), (length, pages) in used.items():
            want = self.lengths[rid] if label == "main" else length
            extra = sum(a.spans.get(rid, 0) for a in self.admitted if not a.void)
            assert length == want, f"{label} of {rid} is {length} long, not {want}"
            assert -(-length // PAGE) <= len(pages) <= -(-(length + extra) // PAGE)

    def teardown(self) -> None:
        if not hasattr(self, "kv"):
            return
        for a in list(self.admitted):
            self.runner.rollback(NODE, a.step, a.ctx)
        for rid in list(self.lengths):
            self.remove(rid)
        (free, streams), *rest = self.snapshot()
        (all_free, none), *nothing = self.empty
        assert (sorted(free), streams, rest) == (sorted(all_free), none, nothing), "kept something"

    # ---- inside

    def declare(self, asked: dict[int, int], both: bool) -> tuple[SubmoduleStep, StepContext]:
        infos = [RequestInfo(r, "w", PARAMS, position=self.lengths[r]) for r in asked]
        ctx = StepContext(NODE, "w", list(asked), infos, list(asked.values()))
        main = ResourceStep(ctx.segments("main"))
        parts = {r.key: main for r in self.resources}
        if both:
            draft = [Segment(r, "draft", 1) for r in asked]
            parts["kv"] = ResourceStep([*main.segments, *draft])
            del parts["attention"], parts["positions"]
        return SubmoduleStep(parts), ctx

    def check_plan(self, a: Admitted, plans: dict[str, Any]) -> None:
        own = plans["own_positions"].tolist()
        assert own == [self.lengths[r] + k for r, n in a.spans.items() for k in range(n)]
        slots = plans["kv"].slots.tolist()
        assert len(set(slots)) == len(slots), "two tokens in one place"
        assert min(slots) >= PAGE, "a token in the sink"

    def in_a_step(self, rid: int) -> bool:
        return any(rid in a.spans for a in self.admitted)

    def take(self, which: int) -> Admitted | None:
        return self.admitted[which % len(self.admitted)] if self.admitted else None

    def snapshot(self) -> list[Any]:
        return [r.snapshot() for r in self.resources]


def test_admission_is_a_transaction_over_all_kinds() -> None:
    run_machine(Resources, settings=budget(40))


# ---- bugs planted on purpose


class ForgetsToRollBack(PagedKv):
    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        pass


class LeaksADraft(PagedKv):
    def remove_request(self, request_id: int) -> None:
        labels, self.labels = self.labels, self.labels[:1]
        super().remove_request(request_id)
        self.labels = labels


class KeepsAPageOnReset(PagedKv):
    def reset_request(self, request_id: int) -> None:
        self._streams.column("length")[self._streams.get((request_id, "main"))] = 0


class ReservesAPageTooMany(PagedKv):
    def admit(self, step: ResourceStep, ctx: StepContext) -> AdmitOutcome:
        more = [Segment(s.request_id, s.label, s.span + PAGE) for s in step.segments]
        return super().admit(ResourceStep(more), ctx)


class UndoesNothing(StepRunner):
    def admit(self, node: str, step: SubmoduleStep | None, ctx: StepContext) -> Any:
        kept, self.rollback = self.rollback, lambda *a: None  # type: ignore[method-assign]
        try:
            for key, resource, part in self._sweep(node, step):
                outcome = resource.admit(part, ctx)
                if not outcome.ok:
                    return type("Refused", (), {"outcome": outcome, "failed_resource": key})
            return type("Admitted", (), {"outcome": ADMITTED, "failed_resource": None})
        finally:
            self.rollback = kept  # type: ignore[method-assign]


class CommitsTwice(StepRunner):
    def commit(self, node: str, step: SubmoduleStep | None, ctx: StepContext) -> None:
        super().commit(node, step, ctx)
        own = [(k, r, p) for k, r, p in self._sweep(node, step) if k == "own_positions"]
        for _, resource, part in own:
            resource.commit(part, ctx)


POOLS = [ForgetsToRollBack, LeaksADraft, KeepsAPageOnReset, ReservesAPageTooMany]


@pytest.mark.parametrize("broken", [*POOLS, UndoesNothing, CommitsTwice])
def test_it_finds_a_planted_bug(broken: type, monkeypatch: pytest.MonkeyPatch) -> None:
    what = "make_pool" if broken in POOLS else "make_runner"
    monkeypatch.setattr(Resources, what, broken)
    with pytest.raises((AssertionError, PodiumError, KeyError)):
        run_machine(Resources, settings=hunt(200))
