"""EagerStep: prepares, admits, launches, commits and posts one step of one node, uncaptured.

An author's exception fails as few requests as can be: a batched step whose declaration or forward
raises is rolled back and tried again in halves, as nothing was committed, down to the request that
raises alone. An exception of a resource's own, or a lost device, fails the whole step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from protocol import faults
from protocol.clock import Clock
from protocol.errors import Bug, CannotFit, PodiumError
from worker.api.inputs import ModelInputsFromEngine, NodeInputs, StepContext, SubmoduleStep
from worker.api.outputs import StepOutputs
from worker.device.base import Device
from worker.engine.executing_batch import ExecutingBatch
from worker.engine.step_runner import StepRunner
from worker.engine.submodule_management import StandingRows, SubmoduleManagement
from worker.resources.base import AdmitFailedReason, FullAdmitOutcome

_COMMIT = faults.point("worker.gpu.commit")


@dataclass(slots=True)
class Part:
    """Rows that are declared, admitted and launched together: all of a step's, or some (E14)."""

    request_ids: list[int]
    ctx: StepContext
    step: SubmoduleStep | None
    stage: str = ""  # what of the launch is under way, for the story of a failure


class EagerStep:
    def __init__(self, device: Device, runner: StepRunner, clock: Clock) -> None:
        self._device = device
        self._runner = runner
        self._now = clock.monotonic

    # ---- prepare (E11)

    def prepare(self, m: SubmoduleManagement, batch: ExecutingBatch) -> None:
        """Inputs of every request; whoever raises fails alone, None skips. Unknown ones leave."""
        if not m.requests.issuperset(batch.request_ids):
            for rid in [r for r in batch.request_ids if r not in m.requests]:
                batch.skipped_rids.append(rid)
                batch.drop(rid)
        kept = m.standing.get(batch.walk)
        if kept is not None and kept.request_ids == batch.request_ids:
            batch.inputs = dict(kept.inputs)
            batch.running_batched = kept.running_batched
            return
        for rid in list(batch.request_ids):
            try:
                inputs = m.submodule.prepare_inputs(batch.per_request_info[rid])
                if inputs is not None and inputs.span < 1:
                    raise ValueError(f"prepare_inputs gave a span of {inputs.span}")
            except Exception as e:
                self._fail(batch, rid, "prepare", e)
                continue
            if inputs is None:
                batch.skipped_rids.append(rid)
                batch.drop(rid)
            else:
                batch.inputs[rid] = inputs
        if not batch.request_ids:
            return
        rows = self._inputs(batch, batch.request_ids)
        try:
            batch.running_batched = m.submodule.can_batch(batch.walk, rows)
        except Exception:
            self._fail_who_cannot_batch(m, batch)
            rows = self._inputs(batch, batch.request_ids)
            batch.running_batched = bool(rows) and m.submodule.can_batch(batch.walk, rows)
        if rows and batch.walk in m.submodule.steady_walks:
            m.standing[batch.walk] = StandingRows(
                list(batch.request_ids),
                dict(batch.inputs),
                batch.running_batched,
                [i.span for i in rows],
            )

    def _fail_who_cannot_batch(self, m: SubmoduleManagement, batch: ExecutingBatch) -> None:
        """`can_batch` raised for all: those fail for whom it raises alone, too."""
        for rid in list(batch.request_ids):
            try:
                m.submodule.can_batch(batch.walk, self._inputs(batch, [rid]))
            except Exception as e:
                self._fail(batch, rid, "can_batch", e)

    # ---- declare → admit → plan → preprocess → forward → commit

    def run(self, m: SubmoduleManagement, batch: ExecutingBatch) -> None:
        """Launch and commit the step; sets `commit_done` before it collects the outputs (E21).

        A refused admission leaves its reason on the batch, no outputs and nothing reserved.
        """
        parts = self._admit_all(m, batch)
        done: list[StepOutputs] = []
        for i, part in enumerate(parts):
            try:
                done += self._launch(m, batch, part)
            except BaseException:
                for later in parts[i + 1 :]:
                    self._runner.rollback(m.name, later.step, later.ctx)
                raise
        batch.commit_done.set()
        if _COMMIT.act is not None:
            _COMMIT.act()
        batch.outputs = StepOutputs.concat(done)

    def _admit_all(self, m: SubmoduleManagement, batch: ExecutingBatch) -> list[Part]:
        """Every part of the step, admitted; or none, with the refusal on the batch (E14, E16)."""
        while True:
            parts = self._declare_all(m, batch)
            start = self._now()
            admitted: list[Part] = []
            refusal = None
            try:
                for part in parts:
                    outcome = self._runner.admit(m.name, part.step, part.ctx)
                    if not outcome.outcome.ok:
                        refusal = outcome
                        break
                    admitted.append(part)
            except BaseException:
                self._undo(m, admitted)
                raise
            finally:
                batch.exec_timings.reserve += self._now() - start
            if refusal is None:
                return parts
            self._undo(m, admitted)
            if refusal.outcome.reason is not AdmitFailedReason.TERMINAL:
                batch.admit_error = refusal.outcome
                batch.failed_resource = refusal.failed_resource
                return []
            doomed = refusal.outcome.request_id
            for rid in list(batch.request_ids) if doomed is None else [doomed]:
                self._fail(batch, rid, "admit", _never(refusal))

    def _undo(self, m: SubmoduleManagement, parts: Sequence[Part]) -> None:
        for part in reversed(parts):
            self._runner.rollback(m.name, part.step, part.ctx)

    def _declare_all(self, m: SubmoduleManagement, batch: ExecutingBatch) -> list[Part]:
        if batch.running_batched or len(batch.request_ids) == 1:
            return self._declare(m, batch, list(batch.request_ids))
        return [p for r in list(batch.request_ids) for p in self._declare(m, batch, [r])]

    def _declare(
        self, m: SubmoduleManagement, batch: ExecutingBatch, rids: list[int]
    ) -> list[Part]:
        """One part; or its halves, without the requests whose declaration raises (E15)."""
        if not rids:
            return []
        kept = m.standing.get(batch.walk)
        steady = kept is not None and kept.request_ids == rids
        ctx = StepContext(
            node=m.node,
            walk=batch.walk,
            request_ids=rids,
            infos=[batch.per_request_info[r] for r in rids],
            spans=kept.spans
            if kept is not None and steady
            else [batch.inputs[r].span for r in rids],
        )
        if kept is not None and steady and kept.is_declared:
            ctx.steady = True
            return [self._part(batch, ctx, kept.declared)]
        try:
            step = m.submodule.declare_step(ctx)
        except Exception as e:
            if len(rids) == 1:
                self._fail(batch, rids[0], "declare", e)
                return []
            half = len(rids) // 2
            return self._declare(m, batch, rids[:half]) + self._declare(m, batch, rids[half:])
        if kept is not None and steady:
            kept.declared, kept.is_declared = step, True
        return [self._part(batch, ctx, step)]

    @staticmethod
    def _part(batch: ExecutingBatch, ctx: StepContext, step: SubmoduleStep | None) -> Part:
        batch.step_context, batch.declared = ctx, step
        return Part(ctx.request_ids, ctx, step)

    def _launch(
        self, m: SubmoduleManagement, batch: ExecutingBatch, part: Part
    ) -> list[StepOutputs]:
        """Run and commit one admitted part. Raises only what must fail the whole step."""
        try:
            outputs = self._forward(m, batch, part)
        except BaseException as e:
            self._runner.rollback(m.name, part.step, part.ctx)
            if not isinstance(e, Exception) or self._device.fatal(e):
                raise
            return self._isolate(m, batch, part, e)
        start = self._now()
        self._runner.commit(m.name, part.step, part.ctx)
        batch.exec_timings.commit += self._now() - start
        return [outputs]

    def _isolate(
        self, m: SubmoduleManagement, batch: ExecutingBatch, part: Part, error: Exception
    ) -> list[StepOutputs]:
        """A part raised and is rolled back: fail its only request, or try its halves."""
        rids = part.request_ids
        if len(rids) == 1:
            self._fail(batch, rids[0], part.stage, error)
            return []
        done: list[StepOutputs] = []
        for half in (rids[: len(rids) // 2], rids[len(rids) // 2 :]):
            for smaller in self._declare(m, batch, half):
                outcome = self._runner.admit(m.name, smaller.step, smaller.ctx)
                if outcome.outcome.ok:
                    done += self._launch(m, batch, smaller)
                    continue
                for rid in smaller.request_ids:
                    self._fail(batch, rid, "admit", _never(outcome))
        return done

    def _forward(self, m: SubmoduleManagement, batch: ExecutingBatch, part: Part) -> StepOutputs:
        start = self._now()
        part.stage = "plan"
        batch.plans = self._runner.plan(m.name, part.step, part.ctx)
        planned = self._now()
        batch.exec_timings.plan += planned - start
        engine = ModelInputsFromEngine(
            request_ids=part.request_ids,
            infos=part.ctx.infos,
            resources=m.resources,
            plans=batch.plans,
            states=m.states,
            step=part.step,
            device=self._device.torch_device,
        )
        part.stage = "preprocess"
        tensors = m.submodule.preprocess(engine, self._inputs(batch, part.request_ids))
        # As late as can be: whoever submitted the step does Python work of its own from here on,
        # while the forward drops the GIL (E20).
        batch.launch_started_event.set()
        part.stage = "forward"
        forward = m.submodule.forward_batched if batch.running_batched else m.submodule.forward
        outputs = forward(engine, **tensors)
        strange = set(outputs) - batch.per_request_info.keys()
        if strange:
            raise Bug(f"node {m.name!r}: outputs for {sorted(strange)}, which are not in the step")
        batch.exec_timings.forward += self._now() - planned
        return outputs

    # ---- postprocess (E27)

    def postprocess(self, m: SubmoduleManagement, batch: ExecutingBatch) -> None:
        if batch.admit_error is not None or not m.submodule.overrides_postprocess:
            return
        for rid in list(batch.outputs):
            before = batch.outputs[rid]
            try:
                after = m.submodule.postprocess(batch.per_request_info[rid], before)
            except Exception as e:
                self._fail(batch, rid, "postprocess", e)
                continue
            if after is not before:
                batch.outputs.drop(rid)
                batch.outputs.set_row(rid, after)

    # ---- inside

    @staticmethod
    def _inputs(batch: ExecutingBatch, rids: Sequence[int]) -> list[NodeInputs]:
        return [batch.inputs[r] for r in rids]

    @staticmethod
    def _fail(batch: ExecutingBatch, rid: int, stage: str, error: Exception) -> None:
        batch.fail(rid, stage, error)
        batch.drop(rid)


def _never(refusal: FullAdmitOutcome) -> PodiumError:
    """What a request fails with that a resource refuses for good."""
    o = refusal.outcome
    return o.error or CannotFit(f"{refusal.failed_resource}: {o.detail}", request=o.request_id)
