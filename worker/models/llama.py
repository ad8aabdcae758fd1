"""The Llama network over packed tokens, and its loading from a checkpoint.

Legend: T tokens of a step, packed row after row; E hidden size; D head size; V vocabulary.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional

from worker.api.handles import AttentionHandle
from worker.layers.attention import GroupedQueryAttention
from worker.layers.gated_mlp import GatedMLP
from worker.layers.linear import Linear, product_for
from worker.layers.rms_norm import RMSNorm
from worker.layers.rotary import RotaryTable
from worker.models.weights.checkpoint import Checkpoint, LlamaConfig

_SMALL = 1_000_000_000  # weights


class LlamaLayer(nn.Module):
    def __init__(
        self, index: int, c: LlamaConfig, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(c.hidden, c.norm_eps, device=device, dtype=dtype)
        self.attention = GroupedQueryAttention(
            index, c.hidden, c.heads, c.kv_heads, c.head_dim, device=device, dtype=dtype
        )
        self.mlp_norm = RMSNorm(c.hidden, c.norm_eps, device=device, dtype=dtype)
        self.mlp = GatedMLP(c.hidden, c.intermediate, device=device, dtype=dtype)

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, attention: AttentionHandle
    ) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns, attention)
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    """`positions` is how many positions a request can have; the parameters come uninitialized."""

    def __init__(
        self, config: LlamaConfig, positions: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        c = self.config = config
        self.embedding = nn.Parameter(
            torch.empty(c.vocab, c.hidden, device=device, dtype=dtype), False
        )
        self.rotary = RotaryTable(
            positions, c.head_dim, c.rope.theta, c.rope.factors, device=device
        )
        self.layers = nn.ModuleList(
            LlamaLayer(i, c, device=device, dtype=dtype) for i in range(c.layers)
        )
        self.norm = RMSNorm(c.hidden, c.norm_eps, device=device, dtype=dtype)
        self.head = (
            self.embedding
            if c.tied
            else nn.Parameter(torch.empty(c.vocab, c.hidden, device=device, dtype=dtype), False)
        )
        self._project = product_for(self.head)

    def forward(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention: AttentionHandle
    ) -> torch.Tensor:
        """tokens, positions [T] int64 → hidden states [T, E], before the last norm."""
        x = functional.embedding(tokens, self.embedding)
        turns = self.rotary.at(positions)
        for layer in self.layers:
            x = layer(x, turns, attention)
        return x

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """x [S, E], the hidden states of some positions → [S, V] float32."""
        return self._project(self.norm(x), self.head).float()

    def destinations(self) -> Iterator[tuple[str, torch.Tensor]]:
        """A checkpoint's tensor name and the (slice of a) parameter that it fills, one by one."""
        yield "model.embed_tokens.weight", self.embedding
        for i, layer in enumerate(self.layers):
            assert isinstance(layer, LlamaLayer)
            at, mlp, p = layer.attention, layer.mlp, f"model.layers.{i}."
            sizes = [n * at.head_dim for n in (at.heads, at.kv_heads, at.kv_heads)]
            q, k, v = at.qkv.weight.split(sizes)
            gate, up = mlp.gate_up.weight.chunk(2)
            yield p + "input_layernorm.weight", layer.attention_norm.weight
            yield p + "self_attn.q_proj.weight", q
            yield p + "self_attn.k_proj.weight", k
            yield p + "self_attn.v_proj.weight", v
            yield p + "self_attn.o_proj.weight", at.out.weight
            yield p + "post_attention_layernorm.weight", layer.mlp_norm.weight
            yield p + "mlp.gate_proj.weight", gate
            yield p + "mlp.up_proj.weight", up
            yield p + "mlp.down_proj.weight", mlp.down.weight
        yield "model.norm.weight", self.norm.weight
        if not self.config.tied:
            yield "lm_head.weight", self.head


def load_weights(
    network: Llama, checkpoint: Checkpoint, progress: Callable[[int, int, str], None]
) -> None:
    """Fill the network, one tensor at a time, and make it ready to run; `progress` counts tensors.

    Raises `ConfigError` as `Checkpoint.read_into` does.
    """
    total = len(checkpoint.config.tensors())
    progress(0, total, "tensors")
    with torch.no_grad(), _few_threads(network):
        for done, (name, out) in enumerate(network.destinations(), 1):
            checkpoint.read_into(name, out)
            progress(done, total, "tensors")
        for module in network.modules():
            if isinstance(module, Linear):
                module.pack()


@contextmanager
def _few_threads(network: Llama) -> Iterator[None]:
    """One intra-op thread for a small model's thousands of short kernels.

    Each would wait for the slowest of its threads: little is gained on an idle machine, and on a
    busy one (2 cores, load 5) SmolLM2-135M took 6 to 18 s to load instead of 2 to 4 s.
    """
    before = torch.get_num_threads()
    if sum(p.numel() for p in network.parameters()) < _SMALL:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
