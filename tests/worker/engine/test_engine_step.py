"""The path of a step over a submodule that records what it is asked (E11–E23, E27–E39)."""

from typing import ClassVar

import pytest
import torch

from protocol.errors import Bug, CannotFit, RequestFailed
from tests.support.engine_harness import Harness, one_node, reference
from worker.api.inputs import NodeInputs, ResourceStep, SubmoduleStep
from worker.api.model import NodeResourceSpec
from worker.api.outputs import StepOutputs
from worker.api.states import PerRequestState
from worker.api.submodule import NodeSubmodule
from worker.device.cpu import CpuDevice, CpuEvent
from worker.engine.executing_batch import ExecutingBatch
from worker.resources import registry
from worker.resources.base import AdmitFailedReason, AdmitOutcome, Resource

KV = NodeResourceSpec(
    "kv", "paged_kv", ("decoder",), options={"layers": 1, "kv_heads": 1, "head_dim": 1}
)
NOTED = NodeResourceSpec("noted", "noted", ("decoder",), ("kv",))


class Toy(NodeSubmodule):
    """Outputs each request's id; hooks by name replace single steps of the path."""

    def __init__(self, batchable=True, **hooks):
        super().__init__()
        self.batchable = batchable
        self.hooks = hooks
        self.calls = []
        self.batch: ExecutingBatch | None = None

    def _hook(self, name, *args):
        self.calls.append(name)
        if name in self.hooks:
            return self.hooks[name](self, *args)
        return None

    def prepare_inputs(self, info):
        if self._hook("prepare", info) == "skip":
            return None
        return NodeInputs(max(1, len(info.tokens)))

    def can_batch(self, walk, inputs):
        return self.batchable

    def declare_step(self, ctx):
        self._hook("declare", ctx)
        return SubmoduleStep({"kv": ResourceStep(ctx.segments("main"))})

    def preprocess(self, engine, inputs):
        self._hook("preprocess", engine)
        return {"x": torch.tensor(engine.request_ids)}

    def forward_batched(self, engine, **tensors):
        self._hook("forward_batched", engine)
        return StepOutputs(engine.request_ids, {"tokens": tensors["x"]})

    def forward(self, engine, **tensors):
        self._hook("forward", engine)
        return StepOutputs(engine.request_ids, {"tokens": tensors["x"]})

    def postprocess(self, info, outputs):
        self._hook("postprocess", info)
        return outputs


def harness(toy, *specs, pages=20, **how):
    return Harness(one_node(toy, KV, *specs), pages=pages, **how)


def refusing(rid):
    def hook(toy, info_or_engine):
        if info_or_engine.request_id == rid:
            raise ValueError(f"not {rid}")

    return hook


# ---- prepare (E11, E12)


def test_skips_failures_and_unknown_requests_leave_in_order():
    def prepare(toy, info):
        if info.request_id == 3:
            raise ValueError("bad input")
        return "skip" if info.request_id == 2 else None

    h = harness(Toy(prepare=prepare))
    h.add(1, 2, 3, 4)
    batch = h.step({4: [1], 3: [1], 99: [1], 2: [1], 1: [1]})
    assert batch.request_ids == [4, 1]
    assert batch.skipped_rids == [99, 2]
    assert list(batch.failed_requests) == [3]
    assert batch.failed_requests[3].stage == "prepare"
    assert str(batch.failed_requests[3].error) == "bad input"
    assert set(batch.per_request_info) == set(batch.inputs) == {1, 4}
    assert batch.outputs.columns["tokens"].tolist() == [4, 1]
    assert h.out[2] == h.out[3] == []
    assert h.engine.statistics()["pages_used"] == 2


def test_a_batch_left_empty_runs_no_forward():
    toy = Toy(prepare=lambda toy, info: "skip")
    h = harness(toy)
    h.add(1)
    batch = h.step({1: [1]})
    assert toy.calls == ["prepare"]
    assert len(batch.outputs) == 0
    assert batch.error is None
    assert batch.completion_event.query()


def test_an_unknown_node_fails_the_step_and_sets_its_events():
    h = harness(Toy())
    batch = ExecutingBatch(1, 1, "m/encoder", "prefill", [], {})
    h.run(batch)
    assert isinstance(batch.error, Bug)
    assert "no node 'm/encoder' here; nodes: ['m/decoder']" in str(batch.error)


# ---- order (E20, E21, E23)


class ToldEvent(CpuEvent):
    def __init__(self, told):
        self.told = told

    def record(self):
        self.told("completion")


class ToldDevice(CpuDevice):
    """Tells when a completion event is recorded."""

    def __init__(self):
        super().__init__()
        self.told = lambda what: None

    def new_event(self):
        return ToldEvent(lambda what: self.told(what))  # noqa: PLW0108 - told is set later


class Noted(Resource):
    """Tells of every sweep; `answers` are what the next admissions say."""

    told = staticmethod(lambda what: None)
    answers: ClassVar[list[AdmitOutcome | BaseException]] = []

    def admit(self, step, ctx):
        type(self).told("admit")
        answer = type(self).answers.pop(0) if type(self).answers else AdmitOutcome(True)
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def plan(self, step, ctx, plan_results):
        type(self).told("plan")
        return sorted(plan_results)

    def commit(self, step, ctx):
        type(self).told("commit")

    def rollback(self, step, ctx):
        type(self).told("rollback")


class UsesNoted(Toy):
    def declare_step(self, ctx):
        self._hook("declare", ctx)
        rows = ResourceStep(ctx.segments("main"))
        return SubmoduleStep({"noted": rows, "kv": rows})


@pytest.fixture
def noted(monkeypatch):
    monkeypatch.setitem(registry.KINDS, "noted", Noted)
    monkeypatch.setattr(Noted, "answers", [])
    yield Noted
    Noted.told = staticmethod(lambda what: None)


def test_the_order_of_a_step(noted):
    story = []
    batches = []

    def tell(what):
        b = batches[-1] if batches else None
        flags = [
            name
            for name in ("launch_started_event", "commit_done", "outputs_ready")
            if b is not None and getattr(b, name).is_set()
        ]
        story.append((what, len(flags)))

    toy = UsesNoted(
        **{
            name: (lambda toy, *a, name=name: tell(name))
            for name in ("prepare", "declare", "preprocess", "forward_batched", "postprocess")
        }
    )
    device = ToldDevice()
    h = harness(toy, NOTED, device=device)
    device.told = noted.told = tell
    h.add(1, 2)
    batches.append(h.batch({1: [1], 2: [1]}))
    h.run(batches[0])
    assert story == [
        ("prepare", 0),
        ("prepare", 0),
        ("declare", 0),
        ("admit", 0),
        ("plan", 0),
        ("preprocess", 0),
        ("forward_batched", 1),  # launch_started just before the forward
        ("commit", 1),
        ("postprocess", 2),  # commit_done before anything is collected
        ("postprocess", 2),
        ("completion", 2),  # recorded before outputs_ready
    ]
    assert batches[0].plans == {"kv": batches[0].plans["kv"], "noted": ["kv"]}


def test_on_a_failed_step_the_error_is_there_before_any_event(noted):
    seen = []
    h = harness(UsesNoted(), NOTED)
    h.add(1)
    noted.answers.append(RuntimeError("resource is broken"))
    batch = h.batch({1: [1]})
    for name in ("commit_done", "outputs_ready"):
        event = getattr(batch, name)

        def set_and_look(event=event, real=event.set):
            seen.append(batch.error)
            real()

        event.set = set_and_look
    h.run(batch)
    assert seen
    assert all(str(e) == "resource is broken" for e in seen)
    assert len(batch.outputs) == 0
    assert h.engine.statistics()["failed_steps"] == 1


@pytest.mark.parametrize("stage", ["forward_batched", "postprocess"])
def test_an_interpreter_going_down_is_raised_but_frees_the_waiters(stage):
    def leave(toy, engine):
        raise KeyboardInterrupt

    h = harness(Toy(**{stage: leave}))
    h.add(1)
    batch = h.batch({1: [1]})
    h.engine.prepare_batch(batch)
    with pytest.raises(KeyboardInterrupt):
        h.engine.exec_and_postprocess(batch)
    assert isinstance(batch.error, KeyboardInterrupt)
    assert batch.commit_done.is_set()
    assert batch.outputs_ready.is_set()
    assert h.engine.statistics()["pages_used"] == (stage == "postprocess")


@pytest.mark.parametrize("how", ["empty", "refused", "raised"])
def test_exec_alone_sets_commit_done_on_every_exit(noted, how):
    h = harness(UsesNoted(), NOTED)
    h.add(1)
    if how == "refused":
        noted.answers.append(AdmitOutcome(False, reason=AdmitFailedReason.OUT_OF_SPACE))
    elif how == "raised":
        noted.answers.append(RuntimeError("broken"))
    batch = h.batch({} if how == "empty" else {1: [1]}, walk="prefill")
    h.engine.prepare_batch(batch)
    if how == "raised":
        with pytest.raises(RuntimeError, match="broken"):
            h.engine.exec(batch)
    else:
        h.engine.exec(batch)
    assert batch.commit_done.is_set()
    assert not batch.outputs_ready.is_set()


def test_commit_done_is_set_before_outputs_are_collected():
    seen = []

    class Watched(StepOutputs):
        def __len__(self):
            seen.append(toy.batch.commit_done.is_set())
            return super().__len__()

    class Watches(Toy):
        def forward(self, engine, **tensors):
            return Watched(engine.request_ids, {"tokens": tensors["x"]})

    toy = Watches(batchable=False)
    h = harness(toy)
    h.add(1, 2)
    toy.batch = h.batch({1: [1], 2: [1]})
    h.run(toy.batch)
    assert set(seen) == {True}


def test_a_fatal_device_error_fails_the_step_and_is_not_retried():
    class Lost(CpuDevice):
        def fatal(self, error):
            return "CUDA error" in str(error)

    def lose(toy, engine):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    toy = Toy(forward_batched=lose)
    h = harness(toy, device=Lost())
    h.add(1, 2)
    batch = h.step({1: [1], 2: [1]})
    assert toy.calls.count("forward_batched") == 1
    assert not batch.failed_requests
    assert h.engine.is_fatal(batch.error)


# ---- admission (E14, E16)


def test_a_refusal_names_the_resource_and_changes_nothing():
    h = harness(Toy(), pages=3)
    h.add(1, 2, 3)
    h.step({1: [1] * 16})
    batch = h.step({2: [1] * 20, 3: [1]})
    assert batch.error is None
    assert batch.failed_resource == "kv"
    assert batch.admit_error.reason is AdmitFailedReason.OUT_OF_SPACE
    assert batch.admit_error.detail == "needs 3 pages, 2 free of 3"
    assert batch.request_ids == [2, 3]
    assert len(batch.outputs) == 0
    stats = h.engine.statistics()
    assert (stats["pages_free"], stats["refused_steps"]) == (2, 1)
    h.remove(1)
    assert len(h.step({2: [1] * 20, 3: [1]}).outputs) == 2


@pytest.mark.parametrize("answer", ["refuse", "raise"])
@pytest.mark.parametrize("batchable", [True, False])
def test_a_later_resource_that_refuses_gives_back_what_earlier_ones_reserved(
    noted, answer, batchable
):
    toy = UsesNoted(batchable)
    h = harness(toy, NOTED)
    h.add(1, 2)
    if not batchable:
        noted.answers.append(AdmitOutcome(True))  # of the first request
    noted.answers.append(
        AdmitOutcome(False, reason=AdmitFailedReason.OFFLOADING)
        if answer == "refuse"
        else RuntimeError("broken")
    )
    batch = h.step({1: [1] * 20, 2: [1] * 20})
    assert (batch.error is None) is (answer == "refuse")
    assert not {"preprocess", "forward", "forward_batched"} & set(toy.calls)
    assert h.engine.statistics()["pages_used"] == 0


def test_a_terminal_refusal_fails_that_request_and_the_rest_runs():
    h = harness(Toy(), pages=3)
    h.add(1, 3)
    h.add(2, max_tokens=100)
    batch = h.step({1: [1], 2: [1], 3: [1]})
    assert list(batch.failed_requests) == [2]
    assert batch.failed_requests[2].stage == "admit"
    assert isinstance(batch.failed_requests[2].error, CannotFit)
    assert "kv: needs up to 7 pages" in str(batch.failed_requests[2].error)
    assert batch.admit_error is None
    assert h.out[1] == [1]
    assert h.out[3] == [3]


# ---- one at a time (E14)


def test_what_cannot_be_batched_runs_one_by_one_and_is_merged():
    committed = []
    toy = Toy(batchable=False, forward=lambda t, e: committed.append(t.batch.commit_done.is_set()))
    h = harness(toy)
    h.add(1, 2, 3)
    toy.batch = h.batch({3: [1], 1: [1], 2: [1]})
    batch = h.run(toy.batch)
    assert toy.calls.count("forward") == 3
    assert "forward_batched" not in toy.calls
    assert committed == [False] * 3
    assert batch.outputs.request_ids == [3, 1, 2]
    assert batch.outputs.columns["tokens"].tolist() == [3, 1, 2]


def test_one_by_one_an_exception_fails_one_request():
    def forward(toy, engine):
        if engine.request_ids == [2]:
            raise ValueError("no")

    h = harness(Toy(batchable=False, forward=forward))
    h.add(1, 2, 3)
    batch = h.step({1: [1], 2: [1], 3: [1]})
    assert list(batch.failed_requests) == [2]
    assert sorted(batch.outputs) == [1, 3]
    h.step([1, 3])
    assert h.engine.statistics()["pages_used"] == 2


@pytest.mark.parametrize("stage", ["declare", "preprocess"])
def test_an_exception_before_the_forward_fails_one_request_too(stage):
    def hook(toy, what):
        if 2 in what.request_ids:
            raise ValueError("no")

    h = harness(Toy(**{stage: hook}))
    h.add(1, 2, 3)
    batch = h.step({1: [1], 2: [1], 3: [1]})
    assert list(batch.failed_requests) == [2]
    assert sorted(batch.outputs) == [1, 3]


def test_a_single_request_takes_the_batched_forward_if_it_may():
    toy = Toy()
    h = harness(toy)
    h.add(1)
    h.step({1: [1]})
    assert "forward_batched" in toy.calls


# ---- outputs (E22, E27)


def test_outputs_of_strangers_are_a_bug_of_the_author():
    class Strange(Toy):
        def forward_batched(self, engine, **tensors):
            return StepOutputs([77], {"tokens": torch.zeros(1)})

    h = harness(Strange())
    h.add(1)
    batch = h.step({1: [1]})
    assert "outputs for [77], which are not in the step" in str(batch.failed_requests[1].error)


def test_postprocess_may_replace_one_rows_outputs():
    class Replaces(Toy):
        def postprocess(self, info, outputs):
            return {"tokens": [outputs["tokens"][0] + 100]} if info.request_id == 2 else outputs

    h = harness(Replaces())
    h.add(1, 2)
    h.step({1: [1], 2: [1]})
    assert (h.out[1], h.out[2]) == ([1], [102])


# ---- steady batches (E22)


def test_a_steady_batch_skips_preparation_and_declaration():
    toy = Toy()
    toy.steady_walks = frozenset({"decode"})
    h = harness(toy)
    h.add(1, 2, 3)
    h.step({1: [1], 2: [1], 3: [1]})
    del toy.calls[:]
    for _ in range(20):
        h.step([1, 2])
    assert toy.calls.count("prepare") == 2
    assert toy.calls.count("declare") == 1
    assert toy.calls.count("forward_batched") == 20
    h.step([2, 1])
    assert toy.calls.count("prepare") == 4
    h.step([2, 1, 3])
    assert toy.calls.count("prepare") == 7
    h.remove(1)
    batch = h.step([2, 1, 3])
    assert batch.skipped_rids == [1]
    assert batch.request_ids == [2, 3]
    assert h.position == {1: 23, 2: 24, 3: 3}


# ---- requests (E29, E36, E39)


def test_requests_come_and_go_idempotently_with_all_they_own():
    released = []

    class State(PerRequestState):
        def release(self):
            released.append("state")

    class Keeps(Toy):
        def new_state(self, request_id):
            return State()

        def preprocess(self, engine, inputs):
            for rid in engine.request_ids:
                assert engine.states[rid] is engine.states[rid]
            return super().preprocess(engine, inputs)

        def remove_request(self, request_id):
            released.append(request_id)

    h = harness(Keeps())
    h.add(1)
    h.engine.add_request("m/decoder", 1, {})
    h.step({1: [1] * 30})
    assert h.engine.statistics()["pages_used"] == 2
    h.remove(1, 1, 55)
    h.engine.check()
    assert h.engine.statistics()["pages_used"] == 0
    assert released == ["state", 1]
    h.add(1)
    h.step({1: [1]})
    assert h.engine.statistics()["pages_used"] == 1


def test_a_request_that_a_resource_will_not_take_is_unknown_again():
    h = Harness(reference())
    with pytest.raises(ValueError, match="out of range"):
        h.add(1, temperature=-1)
    assert h.engine.statistics()["requests"] == 0
    assert h.engine.statistics()["m/kv.streams"] == 0


def test_removal_asks_everyone_even_if_one_raises(noted, monkeypatch):
    def refuse(self, request_id):
        raise OSError("stuck")

    monkeypatch.setattr(noted, "remove_request", refuse, raising=False)
    h = harness(UsesNoted(), NOTED)
    h.add(1)
    h.step({1: [1]})
    with pytest.raises(OSError, match="stuck"):
        h.remove(1)
    assert h.engine.statistics()["pages_used"] == 0
    h.remove(1)


def test_overrides_are_by_resource(noted, monkeypatch):
    got = {}
    monkeypatch.setattr(
        noted,
        "ingest_request",
        lambda self, rid, o: got.update({rid: dict(o.options)}),
        raising=False,
    )
    h = harness(UsesNoted(), NOTED)
    h.engine.add_request("m/decoder", 1, {"a": 1, "b": 2}, {"noted": {"b": 3}, "kv": {"c": 4}})
    assert got == {1: {"a": 1, "b": 3}}


def test_ready_is_a_poll_that_ends(noted, monkeypatch):
    answers = [
        AdmitOutcome(True, ready=False),
        AdmitOutcome(True),
        AdmitOutcome(False, reason=AdmitFailedReason.TERMINAL, detail="lease 7 is gone"),
    ]
    monkeypatch.setattr(noted, "admit_retrieve", lambda self, rid: answers.pop(0), raising=False)
    h = harness(UsesNoted(), NOTED)
    h.add(1)
    assert h.engine.check_ready(1) is False
    assert h.engine.check_ready(1) is True
    with pytest.raises(CannotFit, match="noted: lease 7 is gone"):
        h.engine.check_ready(1)
    with pytest.raises(RequestFailed, match="request 2 is not known here"):
        h.engine.check_ready(2)


def test_what_resources_publish_reaches_the_batch_and_the_facts(noted, monkeypatch):
    def publish(self, rid):
        if rid == 2:
            raise OSError("no room")
        return {"lease": rid}

    monkeypatch.setattr(noted, "publish", publish, raising=False)
    h = harness(UsesNoted(), NOTED)
    h.add(1, 2)
    batch = h.step({1: [1], 2: [1]})
    h.engine.finalize_batch(batch)
    assert batch.finalized == {1: {"noted": {"lease": 1}}}
    assert batch.per_request_info[1].facts == {"noted": {"lease": 1}}
    assert batch.failed_requests[2].stage == "finalize"


def test_timings_cover_the_stages():
    h = harness(Toy())
    h.add(1)
    batch = h.batch({1: [1]})
    batch.submitted_at = h.engine.clock.monotonic()
    h.run(batch)
    t = batch.exec_timings
    assert min(t.queued, t.prepare, t.reserve, t.plan, t.forward, t.commit) > 0
