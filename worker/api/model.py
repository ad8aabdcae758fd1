"""What a model module in worker/models provides: `build(context) -> LoadedModel`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from protocol.graph import GraphSpec
from worker.api.submodule import NodeSubmodule


@dataclass(frozen=True, slots=True)
class NodeResourceSpec:
    """A resource that nodes of one parallel group share (E1).

    `kind` names a registered resource (`paged_kv`, `sdpa_attention`, `positions`, `sampler`);
    `nodes` use it; `depends_on` are keys of other specs; `options` go to its constructor.
    """

    key: str
    kind: str
    nodes: tuple[str, ...]
    depends_on: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True, slots=True)
class Next:
    """What follows a walk: another walk with its inputs, or, with no walk, done."""

    walk: str | None = None
    inputs: Mapping[str, Any] = field(default_factory=dict[str, Any])


DONE = Next()


@dataclass(frozen=True, slots=True)
class BuildContext:
    """What a builder is given. `progress(done, total, what)` may be called while loading.

    `dtype` is the resolved compute dtype; `source` the resolved path ("" where none is needed);
    `context` the configured token limit or None.
    """

    name: str
    source: str
    device: torch.device
    dtype: torch.dtype
    context: int | None
    options: Mapping[str, Any]
    progress: Callable[[int, int, str], None] = lambda done, total, what: None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to be served by an engine.

    `next_walk(walk, facts)` must be pure; facts are `{"stop": [names], "reason": str, "count":
    int, "last": int}`. `context`: most tokens, prompt and output together. `eos`: ids that end a
    stream unless it asked to ignore them.
    """

    graph: GraphSpec
    submodules: Mapping[str, NodeSubmodule]
    resources: Sequence[NodeResourceSpec]
    next_walk: Callable[[str, Mapping[str, Any]], Next]
    context: int
    vocab: int
    eos: tuple[int, ...] = ()
