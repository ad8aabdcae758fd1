"""Resources of a model: which are built, in what order, and how large (E1, E2). Touches no device
but to allocate what a resource needs."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from worker.api.model import LoadedModel, NodeResourceSpec
from worker.api.nearest import nearest
from worker.resources.base import Resource, ResourceContext
from worker.resources.registry import KINDS


class MissingResource(KeyError):
    """A submodule asked for a resource that its node does not have (E5)."""

    def __str__(self) -> str:
        return str(self.args[0])


class NodeResources(dict[str, Any]):
    """A node's resources by key; a key it lacks raises `MissingResource` naming node and key."""

    def __init__(self, node: str, resources: Mapping[str, Resource]) -> None:
        super().__init__(resources)
        self.node = node

    def __missing__(self, key: str) -> Any:
        raise MissingResource(f"node {self.node!r} has no resource {key!r}; it has {sorted(self)}")


def local_specs(model: LoadedModel, local: Collection[str]) -> list[NodeResourceSpec]:
    """Specs to build, dependencies first; ValueError names the spec and what is wrong with it."""
    specs: dict[str, NodeResourceSpec] = {}
    for s in model.resources:
        if s.key in specs:
            raise ValueError(f"resource {s.key!r} is specified twice")
        if s.kind not in KINDS:
            raise ValueError(f"resource {s.key!r}: unknown kind {s.kind!r}{nearest(s.kind, KINDS)}")
        strange = [n for n in s.nodes if n not in model.graph.nodes]
        if strange:
            raise ValueError(f"resource {s.key!r} names nodes {strange}, not in the graph")
        known = KINDS[s.kind].options_known
        for name in s.options:
            if name not in known:
                raise ValueError(
                    f"resource {s.key!r}: unknown option {name!r}{nearest(name, known)}"
                )
        specs[s.key] = s
    for s in specs.values():
        _check_dependencies(s, specs)
        here = [n for n in s.nodes if n in local]
        if here and len(here) != len(s.nodes):
            raise ValueError(
                f"resource {s.key!r}: its nodes {list(s.nodes)} must lie in one parallel group, "
                f"only {here} are here"
            )
    return [s for s in _in_order(specs) if any(n in local for n in s.nodes)]


def _check_dependencies(s: NodeResourceSpec, specs: Mapping[str, NodeResourceSpec]) -> None:
    for d in s.depends_on:
        if d == s.key:
            raise ValueError(f"resource {s.key!r} depends on itself")
        if d not in specs:
            raise ValueError(f"resource {s.key!r} depends on {d!r}, unknown{nearest(d, specs)}")
        lacking = [n for n in s.nodes if n not in specs[d].nodes]
        if lacking:
            raise ValueError(f"resource {s.key!r} depends on {d!r}, which nodes {lacking} lack")
    if len(set(s.depends_on)) != len(s.depends_on):
        raise ValueError(f"resource {s.key!r} names a dependency twice: {list(s.depends_on)}")


def _in_order(specs: Mapping[str, NodeResourceSpec]) -> list[NodeResourceSpec]:
    done: dict[str, NodeResourceSpec] = {}
    waiting = dict(specs)
    while waiting:
        ready = [k for k, s in waiting.items() if all(d in done for d in s.depends_on)]
        if not ready:
            raise ValueError(f"resources depend on each other in a circle: {sorted(waiting)}")
        for k in ready:
            done[k] = waiting.pop(k)
    return list(done.values())


def build_resources(
    model: LoadedModel,
    specs: Sequence[NodeResourceSpec],
    *,
    device: torch.device,
    default_dtype: torch.dtype,
    pages: int | None,
    kv_bytes: int,
) -> dict[str, Resource]:
    """Build in order; if one raises, those already built are cleaned up."""
    dtypes = {s.key: _dtype(model, s, default_dtype) for s in specs}
    options = {s.key: _options(s) for s in specs}
    per_page = sum(
        KINDS[s.kind].page_bytes(options[s.key], dtypes[s.key])
        for s in specs
        if "default_pages" not in s.options and "pages" not in s.options
    )
    built: dict[str, Resource] = {}
    try:
        for s in specs:
            kind, o = KINDS[s.kind], options[s.key]
            if kind.pooled:
                o.setdefault("context", model.context)
                o["pages"] = _pages(o, pages, kv_bytes, per_page)
            built[s.key] = kind(
                ResourceContext(
                    key=s.key,
                    device=device,
                    dtype=dtypes[s.key],
                    depends_on={d: built[d] for d in s.depends_on},
                    options=o,
                )
            )
    except BaseException:
        clean_up(built.values())
        raise
    return built


def _pages(options: Mapping[str, Any], pages: int | None, kv_bytes: int, per_page: int) -> int:
    """The spec's own size, then the configured one, then the spec's default, then the memory."""
    fixed = options.get("pages") or pages or options.get("default_pages")
    return int(fixed) if fixed else max(1, kv_bytes // max(1, per_page))


def _options(spec: NodeResourceSpec) -> dict[str, Any]:
    options = dict(spec.options)
    if isinstance(options.get("dtype"), str):
        found = getattr(torch, options["dtype"], None)
        if not isinstance(found, torch.dtype):
            raise ValueError(f"resource {spec.key!r}: {options['dtype']!r} is not a torch dtype")
        options["dtype"] = found
    return options


def _dtype(model: LoadedModel, spec: NodeResourceSpec, default: torch.dtype) -> torch.dtype:
    """The autocast dtype of the spec's first node that has one, else its parameters' dtype."""
    modules = [model.submodules[n] for n in spec.nodes if n in model.submodules]
    for m in modules:
        if m.autocast_dtype is not None:
            return m.autocast_dtype
    for m in modules:
        for p in m.parameters():
            if p.is_floating_point():
                return p.dtype
    return default


def clean_up(resources: Collection[Resource]) -> list[Exception]:
    """Clean up every resource, even if one raises; returns what they raised (E40)."""
    errors: list[Exception] = []
    for r in resources:
        try:
            r.cleanup()
        except Exception as e:
            e.add_note(f"while cleaning up resource {r.key!r}")
            errors.append(e)
    return errors
