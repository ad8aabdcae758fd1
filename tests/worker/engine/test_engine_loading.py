"""E1–E5, E9, E37, E40."""

import dataclasses

import pytest
import torch
from torch import nn

from protocol.errors import ConfigError, InvariantViolation
from protocol.graph import GraphSpec, Sequential, Step, Walk
from tests.support.engine_harness import Harness, one_node, reference
from worker.api.inputs import ResourceStep, SubmoduleStep
from worker.api.model import NodeResourceSpec
from worker.api.outputs import StepOutputs
from worker.api.submodule import NodeSubmodule
from worker.device.cpu import CpuDevice
from worker.engine.engine import Engine
from worker.resources import registry
from worker.resources.base import Resource

NODES = ("decoder",)
KV = {"layers": 2, "kv_heads": 1, "head_dim": 4}


def spec(key, kind="positions", nodes=NODES, depends_on=(), **options):
    return NodeResourceSpec(key, kind, nodes, depends_on, options)


class Plain(NodeSubmodule):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(2, 2)

    def forward_batched(self, engine, **tensors):
        return StepOutputs(engine.request_ids, {"tokens": torch.zeros(len(engine.request_ids))})


@pytest.mark.parametrize(
    ("specs", "says"),
    [
        ([spec("a"), spec("a")], "resource 'a' is specified twice"),
        ([spec("a", "positons")], "unknown kind 'positons'; did you mean 'positions'"),
        ([spec("a", nodes=("encoder",))], "'a' names nodes \\['encoder'\\]"),
        ([spec("a", depends_on=("a",))], "'a' depends on itself"),
        ([spec("a", depends_on=("kw",)), spec("kv")], "'a' depends on 'kw', unknown; did you mean"),
        ([spec("a", depends_on=("b", "b")), spec("b")], "names a dependency twice"),
        (
            [spec("a", depends_on=("b",)), spec("b", depends_on=("a",)), spec("c")],
            "in a circle: \\['a', 'b'\\]",
        ),
        ([spec("a", "paged_kv", **KV, layer=1)], "unknown option 'layer'; did you mean 'layers'"),
        ([spec("a", "paged_kv", **KV, dtype="float3")], "'float3' is not a torch dtype"),
        ([spec("a", "sdpa_attention")], "depends on one paged_kv"),
    ],
)
def test_bad_specs_are_refused_by_name(specs, says):
    engine = Engine(CpuDevice())
    with pytest.raises(ValueError, match=says):
        engine.load_model("m", one_node(Plain(), *specs))
    engine.load_model("m", one_node(Plain()))  # nothing was left behind


def two_nodes(*specs):
    graph = GraphSpec(("a", "b"), (Walk("w", Sequential((Step("a"), Step("b")))),), "w")
    model = one_node(Plain(), *specs)
    return dataclasses.replace(model, graph=graph, submodules={"a": Plain(), "b": Plain()})


def test_only_specs_of_local_nodes_are_built_and_a_split_one_is_refused():
    engine = Engine(CpuDevice())
    engine.load_model(
        "m", two_nodes(spec("x", nodes=("a",)), spec("y", nodes=("b",))), local_nodes=["a"]
    )
    assert list(engine.resources["m"]) == ["x"]
    with pytest.raises(ValueError, match=r"'z': its nodes \['a', 'b'\] must lie in one parallel"):
        engine.load_model("n", two_nodes(spec("z", nodes=("a", "b"))), local_nodes=["a"])


def test_a_dependency_that_a_node_lacks_is_refused():
    model = two_nodes(spec("x", nodes=("a", "b"), depends_on=("y",)), spec("y", nodes=("a",)))
    with pytest.raises(ValueError, match=r"'x' depends on 'y', which nodes \['b'\] lack"):
        Engine(CpuDevice()).load_model("m", model)


def test_dependencies_are_built_first_and_pool_size_follows_the_configuration():
    model = one_node(
        Plain(),
        spec("attention", "sdpa_attention", depends_on=("kv",)),
        spec("kv", "paged_kv", **KV),
    )
    for how, pages in (({"pages": 5}, 5), ({"kv_bytes": 10 * 1024 + 5}, 10)):
        engine = Engine(CpuDevice(), dtype_default=torch.bfloat16)
        engine.load_model("m", model, **how)
        kv = engine.resources["m"]["kv"]
        assert kv.page_bytes(KV, torch.float32) == 1024
        assert list(engine.resources["m"]) == ["kv", "attention"]
        assert kv.pool.usable == pages
        assert kv.storage.dtype is torch.float32  # the weights', not the engine's default


def test_kv_dtype_is_the_autocast_dtype():
    module = Plain()
    module.autocast_dtype = torch.bfloat16
    engine = Engine(CpuDevice())
    engine.load_model("m", one_node(module, spec("kv", "paged_kv", **KV)), pages=3)
    assert engine.resources["m"]["kv"].storage.dtype is torch.bfloat16


def test_submodules_are_inference_only():
    module = Plain()
    Engine(CpuDevice()).load_model("m", one_node(module))
    assert not any(p.requires_grad for p in module.parameters())
    assert not module.training


def test_a_key_that_the_node_lacks_fails_at_load_naming_both():
    class Asks(Plain):
        def bind_node_resources(self, resources):
            self.kv = resources["kv"]

    engine = Engine(CpuDevice())
    with pytest.raises(KeyError, match="node 'm/decoder' has no resource 'kv'; it has \\['a'\\]"):
        engine.load_model("m", one_node(Asks(), spec("a")))
    assert "m" not in engine.models


def test_autocast_is_per_node_and_grad_is_off_in_every_author_call():
    seen = []

    class Looks(Plain):
        autocast_dtype = torch.bfloat16

        def _look(self, *_, **__):
            seen.append((torch.is_autocast_enabled("cpu"), torch.is_grad_enabled()))

        def prepare_inputs(self, info):
            self._look()
            return super().prepare_inputs(info)

        def declare_step(self, ctx):
            self._look()

        def preprocess(self, engine, inputs):
            self._look()
            return {}

        def forward_batched(self, engine, **tensors):
            self._look()
            return super().forward_batched(engine)

        def postprocess(self, info, outputs):
            self._look()
            return outputs

        def check_stop(self, info, outputs):
            self._look()
            return {"decode"}

    h = Harness(one_node(Looks()))
    h.add(1)
    batch = h.step({1: [1]})
    assert h.engine.check_stop_for_batch(batch, batch.outputs) == {1: {"decode"}}
    assert seen == [(True, False)] * 6
    assert torch.is_grad_enabled()
    assert not torch.is_autocast_enabled("cpu")


def test_warm_up_leaves_no_page_and_validates():
    h = Harness(reference(), pages=4)
    h.engine.warmup()
    stats = h.engine.statistics()
    assert (stats["pages_used"], stats["steps"], stats["requests"]) == (0, 0, 0)
    h.add(1)
    h.step({1: [1]})
    with pytest.raises(InvariantViolation, match="1 pages still held after warm-up"):
        h.engine.warmup()


def test_warm_up_fails_with_what_the_model_raised():
    class Raises(Plain):
        def forward_batched(self, engine, **tensors):
            raise RuntimeError("no kernel")

    h = Harness(one_node(Raises()))
    with pytest.raises(RuntimeError, match="no kernel"):
        h.engine.warmup()


def test_max_batch_is_announced_per_walk():
    class Capped(Plain):
        def max_batch_size(self, walk):
            return 4 if walk == "prefill" else None

    h = Harness(one_node(Capped()))
    assert h.engine.get_max_batch_size("m/decoder", "prefill") == 4
    assert h.engine.get_max_batch_size("m/decoder", "decode") is None
    assert h.engine.model_spec("m").max_batch == {"decoder/prefill": 4}


def test_shutdown_cleans_up_everything_even_if_one_raises(monkeypatch):
    cleaned = []

    class Noisy(Resource):
        def cleanup(self):
            cleaned.append(self.key)
            if self.key == "b":
                raise OSError("gone")

    monkeypatch.setitem(registry.KINDS, "noisy", Noisy)
    h = Harness(one_node(Plain(), *(spec(k, "noisy") for k in "abc")))
    with pytest.raises(OSError, match="gone"):
        h.engine.shutdown()
    assert sorted(cleaned) == ["a", "b", "c"]
    h.engine.shutdown()
    assert len(cleaned) == 3


def test_a_failed_load_cleans_up_what_it_built(monkeypatch):
    cleaned = []

    class Noisy(Resource):
        def __init__(self, context):
            if context.key == "b":
                raise MemoryError("no room")
            super().__init__(context)

        def cleanup(self):
            cleaned.append(self.key)

    monkeypatch.setitem(registry.KINDS, "noisy", Noisy)
    with pytest.raises(MemoryError):
        Engine(CpuDevice()).load_model(
            "m", one_node(Plain(), spec("a", "noisy"), spec("b", "noisy"))
        )
    assert cleaned == ["a"]


def test_an_unknown_declared_key_fails_the_step_by_name():
    class Wrong(Plain):
        def declare_step(self, ctx):
            return SubmoduleStep({"kv": ResourceStep(ctx.segments("main"))})

    h = Harness(one_node(Wrong(), spec("a")))
    h.add(1)
    batch = h.step({1: [1]})
    assert "node 'm/decoder' declares ['kv'], it has ['a']" in str(batch.error)


def test_reference_options_are_checked():
    with pytest.raises(ConfigError, match="unknown option 'kee'; did you mean 'key'"):
        reference(kee=1)
