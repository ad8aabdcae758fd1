"""GraphSpec: what a model is, as data. A worker announces it; the conductor never imports a model.

A model is a graph of nodes. A walk is one named traversal of it, built from `Step`, `Sequential`,
`Parallel` and `Loop`. A request walks: `entry` first, then whatever follows. Where the follower is
always the same and runs on the same worker, the walk names it in `then`, so that the conductor can
send both stages at once (the conditional join).
"""

from dataclasses import dataclass, field
from typing import Any

from protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Step:
    """One node, once."""

    node: str


@dataclass(frozen=True, slots=True)
class Sequential:
    parts: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class Parallel:
    parts: tuple["Part", ...]


@dataclass(frozen=True, slots=True)
class Loop:
    """`body` again and again, until `check_stop` names this loop or `max_iters` is reached.

    `max_iters` 0: only the request's own `max_tokens` bounds it.
    """

    name: str
    body: "Part"
    max_iters: int = 0


Part = Step | Sequential | Parallel | Loop


@dataclass(frozen=True, slots=True)
class Walk:
    name: str
    body: Part
    then: str | None = None

    @property
    def standing(self) -> bool:
        """True where the walk is a loop: it runs as a standing batch."""
        return isinstance(self.body, Loop)

    def nodes(self) -> tuple[str, ...]:
        return tuple(_nodes(self.body))


@dataclass(frozen=True, slots=True)
class Edge:
    source: str
    target: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """`outputs` names the channels in order; channel 0 carries tokens."""

    nodes: tuple[str, ...]
    walks: tuple[Walk, ...]
    entry: str
    edges: tuple[Edge, ...] = ()
    outputs: tuple[str, ...] = ("tokens",)

    def walk(self, name: str) -> Walk:
        for w in self.walks:
            if w.name == name:
                return w
        raise KeyError(f"no walk {name!r}; this graph has {[w.name for w in self.walks]}")

    def validate(self) -> None:
        """Raises `ValueError` naming the walk and the node that does not exist."""
        names = {w.name for w in self.walks}
        if len(names) != len(self.walks) or len(set(self.nodes)) != len(self.nodes):
            raise ValueError("walk and node names must be unique")
        if self.entry not in names:
            raise ValueError(f"entry walk {self.entry!r} is not one of {sorted(names)}")
        for w in self.walks:
            if w.then is not None and w.then not in names:
                raise ValueError(f"walk {w.name!r} is followed by {w.then!r}, which does not exist")
            for n in w.nodes():
                if n not in self.nodes:
                    raise ValueError(f"walk {w.name!r} names node {n!r}, not one of {self.nodes}")
        for e in self.edges:
            for n in (e.source, e.target):
                if n not in self.nodes:
                    raise ValueError(f"edge {e.source}->{e.target}: no node {n!r}")


def _nodes(part: Part) -> list[str]:
    if isinstance(part, Step):
        return [part.node]
    if isinstance(part, Loop):
        return _nodes(part.body)
    return [n for p in part.parts for n in _nodes(p)]


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """What a worker announces of one model.

    `max_batch`: `"node/walk"` → most rows a batch may have (absent: no cap) (E37).
    `context`: most tokens, prompt and output together. `pages`, `page_tokens`: the KV pool's size
    (pages that requests can use) and tokens per page; 0 where a model has no KV.
    """

    model: str
    graph: GraphSpec
    context: int
    vocab: int
    pages: int = 0
    page_tokens: int = 0
    max_batch: dict[str, int] = field(default_factory=dict[str, int])
    eos: tuple[int, ...] = ()


# ---- wire form: plain lists and maps


def part_to_wire(p: Part) -> list[Any]:
    if isinstance(p, Step):
        return ["step", p.node]
    if isinstance(p, Loop):
        return ["loop", p.name, part_to_wire(p.body), p.max_iters]
    kind = "seq" if isinstance(p, Sequential) else "par"
    return [kind, *(part_to_wire(x) for x in p.parts)]


def part_from_wire(v: Any, depth: int = 0) -> Part:
    try:
        kind, *rest = v
        if depth > 16:
            raise ValueError("nested too deep")
        if kind == "step":
            return Step(str(rest[0]))
        if kind == "loop":
            return Loop(str(rest[0]), part_from_wire(rest[1], depth + 1), int(rest[2]))
        if kind in ("seq", "par"):
            parts = tuple(part_from_wire(x, depth + 1) for x in rest)
            return Sequential(parts) if kind == "seq" else Parallel(parts)
    except (TypeError, ValueError, IndexError) as e:
        raise InvalidRequest(f"walk body: {e}") from None
    raise InvalidRequest(f"walk body: unknown kind {kind!r}")


def spec_to_wire(s: ModelSpec) -> dict[str, Any]:
    g = s.graph
    return {
        "model": s.model,
        "graph": {
            "nodes": list(g.nodes),
            "walks": [[w.name, part_to_wire(w.body), w.then] for w in g.walks],
            "entry": g.entry,
            "edges": [[e.source, e.target, e.name] for e in g.edges],
            "outputs": list(g.outputs),
        },
        "context": s.context,
        "vocab": s.vocab,
        "pages": s.pages,
        "page_tokens": s.page_tokens,
        "max_batch": dict(s.max_batch),
        "eos": list(s.eos),
    }


def spec_from_wire(v: dict[str, Any]) -> ModelSpec:
    """Raises `InvalidRequest` on anything that is not a valid spec."""
    try:
        g = v["graph"]
        graph = GraphSpec(
            nodes=tuple(map(str, g["nodes"])),
            walks=tuple(Walk(str(n), part_from_wire(b), t) for n, b, t in g["walks"]),
            entry=str(g["entry"]),
            edges=tuple(Edge(*map(str, e)) for e in g["edges"]),
            outputs=tuple(map(str, g["outputs"])),
        )
        graph.validate()
        return ModelSpec(
            model=str(v["model"]),
            graph=graph,
            context=int(v["context"]),
            vocab=int(v["vocab"]),
            pages=int(v["pages"]),
            page_tokens=int(v["page_tokens"]),
            max_batch={str(k): int(n) for k, n in v["max_batch"].items()},
            eos=tuple(map(int, v["eos"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as e:
        raise InvalidRequest(f"model spec: {type(e).__name__}: {e}") from None
