"""GraphSpec: validation by name, and the wire form."""

import pytest

from protocol.errors import InvalidRequest
from protocol.graph import (
    Edge,
    GraphSpec,
    Loop,
    ModelSpec,
    Parallel,
    Sequential,
    Step,
    Walk,
    spec_from_wire,
    spec_to_wire,
)

GRAPH = GraphSpec(
    nodes=("encoder", "decoder"),
    walks=(
        Walk("prefill", Sequential((Step("encoder"), Step("decoder"))), then="decode"),
        Walk("decode", Loop("tokens", Step("decoder"), 7)),
        Walk("both", Parallel((Step("encoder"), Step("decoder")))),
    ),
    entry="prefill",
    edges=(Edge("encoder", "decoder", "hidden"),),
)
SPEC = ModelSpec("m", GRAPH, 2048, 100, 64, 16, {"decoder/decode": 8}, (1, 2))


def test_the_wire_form_keeps_everything() -> None:
    assert spec_from_wire(spec_to_wire(SPEC)) == SPEC


def test_only_loops_stand() -> None:
    assert [w.standing for w in GRAPH.walks] == [False, True, False]
    assert GRAPH.walk("prefill").nodes() == ("encoder", "decoder")
    with pytest.raises(KeyError, match="no walk 'x'"):
        GRAPH.walk("x")


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (GraphSpec(("a",), (Walk("w", Step("b")),), "w"), "walk 'w' names node 'b'"),
        (GraphSpec(("a",), (Walk("w", Step("a")),), "v"), "entry walk 'v'"),
        (GraphSpec(("a",), (Walk("w", Step("a"), then="v"),), "w"), "followed by 'v'"),
        (GraphSpec(("a", "a"), (Walk("w", Step("a")),), "w"), "must be unique"),
        (GraphSpec(("a",), (Walk("w", Step("a")),), "w", (Edge("a", "z"),)), "no node 'z'"),
    ],
)
def test_mistakes_are_named(graph: GraphSpec, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        graph.validate()


@pytest.mark.parametrize(
    "damage",
    [
        {"graph": None},
        {"context": "x"},
        {"graph": {"nodes": []}},
        {"max_batch": 3},
        {"graph": {**spec_to_wire(SPEC)["graph"], "entry": "zzz"}},
        {"graph": {**spec_to_wire(SPEC)["graph"], "walks": [["w", ["spiral"], None]]}},
        {"graph": {**spec_to_wire(SPEC)["graph"], "walks": [["w", 7, None]]}},
    ],
)
def test_a_damaged_wire_form_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest, match=r"model spec|walk body"):
        spec_from_wire({**spec_to_wire(SPEC), **damage})


def test_a_walk_nested_too_deep_is_refused() -> None:
    body: list[object] = ["step", "decoder"]
    for _ in range(50):
        body = ["seq", body]
    wire = spec_to_wire(SPEC)
    wire["graph"]["walks"] = [["prefill", body, None]]
    with pytest.raises(InvalidRequest, match="too deep"):
        spec_from_wire(wire)
