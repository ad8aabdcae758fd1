"""Self-attention with grouped queries, over an attention handle."""

import torch
from torch import nn
from torch.nn import functional

from worker.api.handles import AttentionHandle
from worker.layers.rotary import rotate


class GroupedQueryAttention(nn.Module):
    """One layer's attention: `heads` query heads share `kv_heads` keys and values of `head_dim`.

    Weights: `qkv` [(Hq + 2 Hkv) D, E], rows of q, k and v below each other, so that one product
    computes all three; `out` [E, Hq D].
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
        self.qkv = nn.Parameter(torch.empty(rows, hidden, device=device, dtype=dtype), False)
        self.out = nn.Parameter(
            torch.empty(hidden, heads * head_dim, device=device, dtype=dtype), False
        )

    def forward(
        self,
        x: torch.Tensor,
        turns: torch.Tensor,
        residual: torch.Tensor,
        attention: AttentionHandle,
    ) -> torch.Tensor:
        """x, residual [T, E]; turns [T, 1, D / 2] → residual + attention(x), [T, E]."""
        heads = functional.linear(x, self.qkv).unflatten(-1, (-1, self.head_dim))
        turned = rotate(heads[:, : self.heads + self.kv_heads], turns)
        q, k = turned[:, : self.heads], turned[:, self.heads :]
        o = attention.run(self.layer, q, k, heads[:, self.heads + self.kv_heads :])
        return torch.addmm(residual, o.flatten(1), self.out.t())
