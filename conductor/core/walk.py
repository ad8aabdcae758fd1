"""What a request walks: pure functions over a graph.

This conductor drives graphs whose entry walk is one node run once, optionally followed (`then`) by
a loop over one node, or whose entry walk is such a loop itself.
"""

from dataclasses import dataclass

from protocol.errors import InvalidRequest
from protocol.graph import GraphSpec, Loop, Step, Walk


@dataclass(frozen=True, slots=True)
class WalkNode:
    """A walk and the one node it runs; `node` as the model names it, without the model."""

    walk: str
    node: str


@dataclass(frozen=True, slots=True)
class Path:
    """The stages of one row: `chunks` are the input tokens of successive one-shot stages of
    `one_shot` (empty where there is none), then the standing stage, if any."""

    one_shot: WalkNode | None
    chunks: tuple[int, ...]
    standing: WalkNode | None


@dataclass(frozen=True, slots=True)
class Itinerary:
    """Which walks every request of a graph goes through."""

    one_shot: WalkNode | None
    standing: WalkNode | None


def itinerary(graph: GraphSpec) -> Itinerary:
    """Raises `InvalidRequest`, naming the walk, for a graph that this conductor cannot drive."""
    entry = graph.walk(graph.entry)
    if entry.standing:
        if entry.then is not None:
            raise InvalidRequest(f"walk {entry.name!r} is a loop that is followed by another walk")
        return Itinerary(None, _only_node(entry))
    if entry.then is None:
        return Itinerary(_only_node(entry), None)
    following = graph.walk(entry.then)
    if not following.standing or following.then is not None:
        raise InvalidRequest(
            f"walk {entry.name!r} is followed by {following.name!r}, which is not a final loop"
        )
    return Itinerary(_only_node(entry), _only_node(following))


def _only_node(walk: Walk) -> WalkNode:
    part = walk.body.body if isinstance(walk.body, Loop) else walk.body
    if not isinstance(part, Step):
        raise InvalidRequest(f"walk {walk.name!r} has more than one node")
    return WalkNode(walk.name, part.node)


def path(graph: GraphSpec, tokens: int, chunk: int) -> Path:
    """The path of a row with this many input tokens, at most `chunk` of them per stage."""
    plan = itinerary(graph)
    if plan.one_shot is None:
        return Path(None, (), plan.standing)
    full, rest = divmod(tokens, chunk)
    return Path(plan.one_shot, (chunk,) * full + ((rest,) if rest else ()), plan.standing)
