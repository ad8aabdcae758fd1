"""Paths over graphs."""

import pytest

from conductor.core.walk import Path, WalkNode, path
from protocol.errors import InvalidRequest
from protocol.graph import GraphSpec, Loop, Sequential, Step, Walk
from tests.support.conductor_driver import DECODER

PREFILL, DECODE = WalkNode("prefill", "decoder"), WalkNode("decode", "decoder")


@pytest.mark.parametrize(
    ("tokens", "chunks"),
    [(1, (1,)), (16, (16,)), (17, (16, 1)), (48, (16, 16, 16)), (50, (16, 16, 16, 2))],
)
def test_a_prompt_is_cut_into_chunks_before_the_standing_walk(
    tokens: int, chunks: tuple[int, ...]
) -> None:
    assert path(DECODER, tokens, 16) == Path(PREFILL, chunks, DECODE)


def test_a_graph_that_begins_with_a_loop_has_no_one_shot_stage() -> None:
    graph = GraphSpec(("d",), (Walk("denoise", Loop("steps", Step("d"), 50)),), "denoise")
    assert path(graph, 5, 16) == Path(None, (), WalkNode("denoise", "d"))


def test_a_walk_that_nothing_follows_is_one_shot_only() -> None:
    graph = GraphSpec(("e",), (Walk("embed", Step("e")),), "embed")
    assert path(graph, 5, 16) == Path(WalkNode("embed", "e"), (5,), None)


def test_what_cannot_be_driven_is_refused_by_name() -> None:
    two = GraphSpec(("a", "b"), (Walk("both", Sequential((Step("a"), Step("b")))),), "both")
    with pytest.raises(InvalidRequest, match="'both' has more than one node"):
        path(two, 5, 16)
    chain = GraphSpec(("a",), (Walk("x", Step("a"), "y"), Walk("y", Step("a"))), "x")
    with pytest.raises(InvalidRequest, match="'x' is followed by 'y'"):
        path(chain, 5, 16)
    loops = GraphSpec(("a",), (Walk("x", Loop("l", Step("a")), "y"), Walk("y", Step("a"))), "x")
    with pytest.raises(InvalidRequest, match="'x' is a loop"):
        path(loops, 5, 16)
