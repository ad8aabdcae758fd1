"""Self-attention with grouped queries, over an attention handle."""

import torch
from torch import nn

from worker.api.handles import AttentionHandle
from worker.layers.linear import Linear
from worker.layers.rotary import rotate


class GroupedQueryAttention(nn.Module):
    """One layer's attention: `heads` query heads share `kv_heads` keys and values of `head_dim`.

    `qkv` computes q, k and v in one product: its rows are theirs, below each other.
    """

    def __init__(
        self,
        layer: int,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.layer, self.heads, self.kv_heads, self.head_dim = layer, heads, kv_heads, head_dim
        rows = (heads + 2 * kv_heads) * head_dim
        self.qkv = Linear(hidden, rows, device=device, dtype=dtype)
        self.out = Linear(heads * head_dim, hidden, device=device, dtype=dtype)

    def forward(
        self, x: torch.Tensor, turns: torch.Tensor, attention: AttentionHandle
    ) -> torch.Tensor:
        """x [T, E], turns [T, 1, D / 2] → [T, E]."""
        heads = self.qkv(x).unflatten(-1, (-1, self.head_dim))
        turning = self.heads + self.kv_heads
        turned = rotate(heads[:, :turning], turns)
        q, k, v = turned[:, : self.heads], turned[:, self.heads :], heads[:, turning:]
        return self.out(attention.run(self.layer, q, k, v).flatten(1))
