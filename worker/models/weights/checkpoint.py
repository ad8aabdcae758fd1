"""Checkpoint: a model's configuration and tensors, whatever file format they came from.

Names and shapes are those of a Hugging Face Llama checkpoint. The layout of q and k rows is this
project's own: the two halves that RoPE rotates together are interleaved (see layers/rotary.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from protocol.errors import ConfigError

_SHOWN = 4


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Rotary embedding: base `theta`; `factors` [head_dim / 2] divide the frequencies, or None."""

    theta: float
    factors: tuple[float, ...] | None = None


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Sizes of a Llama decoder. `tied`: the vocabulary projection is the embedding itself."""

    vocab: int
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    rope: RopeSettings
    tied: bool
    eos: tuple[int, ...]

    def check(self, where: Path) -> None:
        """Raises `ConfigError` naming the first size that cannot be."""
        for name in ("vocab", "hidden", "intermediate", "layers", "heads", "kv_heads", "context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{where}: {name} is {getattr(self, name)}; at least 1 is needed")
        if self.head_dim < 2 or self.head_dim % 2:
            raise ConfigError(f"{where}: head_dim is {self.head_dim}; RoPE needs an even number")
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"{where}: {self.heads} attention heads do not divide over {self.kv_heads} KV heads"
            )
        if not (self.norm_eps > 0 and self.rope.theta > 0):
            raise ConfigError(f"{where}: the norm's epsilon and rope_theta must be above 0")
        bad = [t for t in self.eos if not 0 <= t < self.vocab]
        if bad:
            raise ConfigError(
                f"{where}: end-of-stream token {bad[0]} is outside the vocabulary of {self.vocab}"
            )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Name → shape of every tensor that such a model has."""
        h, q, kv = self.hidden, self.heads * self.head_dim, self.kv_heads * self.head_dim
        found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocab, h)}
        for i in range(self.layers):
            p = f"model.layers.{i}."
            found |= {
                p + "input_layernorm.weight": (h,),
                p + "self_attn.q_proj.weight": (q, h),
                p + "self_attn.k_proj.weight": (kv, h),
                p + "self_attn.v_proj.weight": (kv, h),
                p + "self_attn.o_proj.weight": (h, q),
                p + "post_attention_layernorm.weight": (h,),
                p + "mlp.gate_proj.weight": (self.intermediate, h),
                p + "mlp.up_proj.weight": (self.intermediate, h),
                p + "mlp.down_proj.weight": (h, self.intermediate),
            }
        found["model.norm.weight"] = (h,)
        if not self.tied:
            found["lm_head.weight"] = (self.vocab, h)
        return found


class Checkpoint(Protocol):
    """An opened checkpoint whose headers were read and found sound.

    `path` is what messages name; `shapes` has every tensor of the files, without those that carry
    nothing of their own (a tied head stored twice, saved rotary frequencies).
    """

    path: Path
    config: LlamaConfig
    shapes: Mapping[str, tuple[int, ...]]

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fill `out` (of the tensor's shape, any float dtype and device) with a tensor's values.

        Holds one tensor in host memory at a time. Raises `ConfigError` if the file cannot be read.
        """
        ...


def check_tensors(checkpoint: Checkpoint) -> None:
    """Raises `ConfigError` naming the missing, extra or mis-shaped tensors, the first few of each.

    Reads no tensor's data: call it before memory is allocated.
    """
    wanted, found = checkpoint.config.tensors(), checkpoint.shapes
    missing = [n for n in wanted if n not in found]
    extra = [n for n in found if n not in wanted]
    shaped = [
        f"{n} is {list(found[n])}, not {list(s)}"
        for n, s in wanted.items()
        if n in found and tuple(found[n]) != s
    ]
    problems = [
        f"{len(names)} {what}: {_some(names)}"
        for what, names in (("missing", missing), ("not known", extra), ("mis-shaped", shaped))
        if names
    ]
    if problems:
        raise ConfigError(
            f"{checkpoint.path}: the tensors are not those of the Llama model that its "
            f"configuration describes: {'; '.join(problems)}. Use a complete, "
            "unmodified checkpoint whose configuration and weights belong together",
            path=str(checkpoint.path),
            missing=len(missing),
            extra=len(extra),
            misshaped=len(shaped),
        )


def interleave(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k [heads * D, …] from half-split order (x…, y…) to pairs (x, y, x, y, …)."""
    rows = w.shape[0]
    halves = w.view(heads, 2, rows // heads // 2, *w.shape[1:])
    return halves.transpose(1, 2).reshape(w.shape)


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
