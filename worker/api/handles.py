"""What resources look like from a model: plans (a step's structures) and handles (their calls).

A submodule takes handles once, in `bind_node_resources`, and names in `declare_step` every one that
the step uses. Plans are in `engine.plans` under the resource's key; they and the handles' calls
are valid from `preprocess` to the end of the forward of that same step.

Legend: T tokens of the step, packed row after row; B rows; S rows that sample (`info.samples`), in
row order; L a row's tokens; P pages; Hq, Hkv heads; D head size; V vocabulary.

A decoder's step, with resource keys `kv`, `attention`, `positions`, `sampler`:

    tokens_T  = host tokens of every row (prefill), or sampler.last_tokens() (decode)
    x_TE      = embed(tokens_T); rotate by engine.plans["positions"]
    o_THD     = attention.run(layer, q_THD, k_THD, v_THD)      # in each layer
    x_SE      = sampler.last_rows(x_TE)                        # before the vocabulary projection
    tokens_S  = sampler.sample(head(x_SE))
    return StepOutputs(sampler.request_ids, {"tokens": tokens_S})
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch

PositionsPlan: TypeAlias = torch.Tensor
"""Plan of `positions`: [T] int64 on the device, each token's position in its request, from 0."""


@dataclass(frozen=True, slots=True)
class KvPlan:
    """Plan of `paged_kv`. Tensors are int64 on the device; sequences are host values, by row.

    `page_table` [B, Pmax]: each row's pages in order; page 0, the sink, fills the rest.
    `slots` [T]: where each token of the step is written, as page * page_tokens + offset.
    `lengths` [B]: tokens of each row, this step's included. `positions` [T]: as `PositionsPlan`.
    `starts`: tokens of each row before this step. `spans`: tokens of each row in this step.
    `decode`: every span is 1.
    """

    page_table: torch.Tensor
    slots: torch.Tensor
    lengths: torch.Tensor
    positions: torch.Tensor
    starts: Sequence[int]
    spans: Sequence[int]
    decode: bool


@dataclass(frozen=True, slots=True)
class SamplerPlan:
    """Plan of `sampler`. `request_ids`: the S rows that sample, in row order.

    `last_index` [S] int64 on the device: where in T each of them has its last token; None where
    that is every token of the step (plain decode), so that no gather is needed.
    """

    request_ids: Sequence[int]
    last_index: torch.Tensor | None


class KvHandle(Protocol):
    """`paged_kv`: pages of keys and values by layer; all layers share one page table."""

    page_tokens: int

    def keys(self, layer: int) -> torch.Tensor:
        """[P, page_tokens, Hkv, D], contiguous. Page 0 is a sink whose content means nothing."""
        ...

    def values(self, layer: int) -> torch.Tensor:
        """As `keys`. Raises ValueError where the resource was built with `values: False`."""
        ...

    def write(self, layer: int, k: torch.Tensor, v: torch.Tensor | None = None) -> None:
        """Write this step's k, v [T, Hkv, D] to the planned slots."""
        ...


class AttentionHandle(Protocol):
    """`sdpa_attention`: causal attention of the step's tokens over their rows' whole history."""

    def run(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] → [T, Hq, D]; k and v are written to the pages first.

        Hq must be a multiple of Hkv. Scale: the option `scale`, else D ** -0.5.
        """
        ...


class SamplerHandle(Protocol):
    """`sampler`: per-request sampling parameters, and the last token of each row on the device."""

    @property
    def request_ids(self) -> Sequence[int]:
        """The S rows that sample, in row order: the rows of the step's output columns."""
        ...

    def last_tokens(self) -> torch.Tensor:
        """[B] int64 on the device: each row's latest sampled token, the input of a decode step."""
        ...

    def last_rows(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, …] → [S, …]: the last position of every row that samples."""
        ...

    def sample(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [S, V] → tokens [S] int64. Call once a step, or `accept` instead.

        Draws are keyed by (seed, output position) alone; a row's token depends on no other row.
        """
        ...

    def accept(self, tokens: torch.Tensor) -> torch.Tensor:
        """Take tokens [S] int64 that the model chose itself as the step's samples; returns them."""
        ...
