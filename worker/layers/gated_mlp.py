"""The gated feed-forward block (SwiGLU)."""

import torch
from torch import nn
from torch.nn import functional

from worker.layers.linear import Linear


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)); `gate_up` computes both in one product, gate's rows first."""

    def __init__(
        self, hidden: int, intermediate: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.gate_up = Linear(hidden, 2 * intermediate, device=device, dtype=dtype)
        self.down = Linear(intermediate, hidden, device=device, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, E] → [T, E]."""
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(functional.silu(gate).mul_(up))
