"""What every resource promises (worker/resources/base.py), as one property over random histories.

Authors of a resource run it over theirs: `check_resource(make, history)` with `histories()`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from worker.api.inputs import RequestInfo, ResourceStep, StepContext
from worker.resources.base import Resource, ResourceContext, ResourceReqConfig

PARAMS = {"max_tokens": 8, "temperature": 0.5, "seed": 3}


def context(
    key: str, *depends_on: Resource, dtype: torch.dtype = torch.float32, **options: object
) -> ResourceContext:
    return ResourceContext(key, torch.device("cpu"), dtype, {r.key: r for r in depends_on}, options)


@dataclass
class Stack:
    """A resource under test behind what it depends on, in dependency order."""

    resources: list[Resource]
    lengths: dict[int, int] = field(default_factory=dict)

    def ingest(self, rid: int) -> None:
        for r in self.resources:
            r.ingest_request(rid, ResourceReqConfig(PARAMS))
        self.lengths.setdefault(rid, 0)

    def remove(self, rid: int) -> None:
        for r in reversed(self.resources):
            r.remove_request(rid)
        self.lengths.pop(rid, None)

    def step(self, spans: dict[int, int]) -> tuple[ResourceStep, StepContext]:
        infos = [RequestInfo(r, "w", PARAMS, position=self.lengths[r]) for r in spans]
        ctx = StepContext("n", "w", list(spans), infos, list(spans.values()))
        return ResourceStep(ctx.segments("main")), ctx

    def admit(self, step: ResourceStep, ctx: StepContext) -> bool:
        for i, r in enumerate(self.resources):
            before = [x.snapshot() for x in self.resources[i:]]
            if not r.admit(step, ctx).ok:
                assert [x.snapshot() for x in self.resources[i:]] == before, "refused, yet changed"
                for done in reversed(self.resources[:i]):
                    done.rollback(step, ctx)
                return False
        return True

    def plan(self, step: ResourceStep, ctx: StepContext) -> dict[str, object]:
        results: dict[str, object] = {}
        for r in self.resources:
            results[r.key] = r.plan(step, ctx, results)
        return results

    def rollback(self, step: ResourceStep, ctx: StepContext) -> None:
        for r in reversed(self.resources):
            r.rollback(step, ctx)

    def commit(self, step: ResourceStep, ctx: StepContext) -> None:
        for r in self.resources:
            accept = getattr(r, "accept", None)
            if accept is not None:
                accept(torch.arange(len(ctx.request_ids)))
            r.commit(step, ctx)
        for rid, span in zip(ctx.request_ids, ctx.spans, strict=True):
            self.lengths[rid] += span

    def check(self) -> None:
        for r in self.resources:
            r.check()

    def snapshot(self) -> list[object]:
        return [r.snapshot() for r in self.resources]


def histories() -> st.SearchStrategy[list[tuple[str, dict[int, int]]]]:
    """Operations over request ids 1 … 6; the spans of `step` and `undo` are by id."""
    spans = st.dictionaries(st.integers(1, 6), st.integers(1, 40), min_size=1, max_size=4)
    return st.lists(
        st.tuples(st.sampled_from(["ingest", "remove", "reset", "step", "undo", "step"]), spans),
        max_size=25,
    )


def check_resource(
    make: Callable[[], list[Resource]], history: list[tuple[str, dict[int, int]]]
) -> None:
    """Raises where a promise is broken; ends with every request removed and the first state."""
    stack = Stack(make())
    empty = stack.snapshot()
    for op, spans in history:
        if op in ("step", "undo"):
            known = {r: s for r, s in spans.items() if r in stack.lengths}
            if known:
                _try_step(stack, known, undo=op == "undo")
        else:
            for rid in spans:
                _act(stack, op, rid)
        stack.check()
    for rid in range(1, 7):
        stack.remove(rid)
    stack.check()
    end = stack.snapshot()
    assert [_sorted(x) for x in end] == [_sorted(x) for x in empty], (
        "removed, yet something is kept"
    )


def _act(stack: Stack, op: str, rid: int) -> None:
    """Every request-level call is idempotent."""
    if op == "reset" and rid in stack.lengths:
        for r in stack.resources:
            r.reset_request(rid)
        stack.lengths[rid] = 0
    elif op == "ingest":
        stack.ingest(rid)
        once = stack.snapshot()
        stack.ingest(rid)
        assert stack.snapshot() == once, "a second ingest changed something"
    elif op == "remove":
        stack.remove(rid)
        once = stack.snapshot()
        stack.remove(rid)
        assert stack.snapshot() == once, "a second remove changed something"


def _try_step(stack: Stack, spans: dict[int, int], undo: bool) -> None:
    before = stack.snapshot()
    step, ctx = stack.step(spans)
    if not stack.admit(step, ctx):
        assert stack.snapshot() == before, "refused, yet changed"
        return
    reserved = stack.snapshot()
    assert stack.admit(step, ctx), "an unchanged step is refused the second time"
    assert stack.snapshot() == reserved, "an unchanged step reserved something twice"
    stack.plan(step, ctx)
    if undo:
        stack.rollback(step, ctx)
        assert stack.snapshot() == before, "rolled back, yet changed"
        stack.rollback(step, ctx)
        assert stack.snapshot() == before, "a second rollback changed something"
    else:
        stack.commit(step, ctx)


def _sorted(state: object) -> object:
    """The order of free pages may differ at the end; which are free may not."""
    if isinstance(state, tuple):
        free, rest = state
        return sorted(free), rest
    return state
