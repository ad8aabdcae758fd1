"""The gated feed-forward block (SwiGLU)."""

import torch
from torch import nn
from torch.nn import functional


class GatedMLP(nn.Module):
    """silu(x · gateᵀ) * (x · upᵀ) · downᵀ.

    Weights: `gate_up` [2 I, E], gate above up, so that one product computes both; `down` [E, I].
    """

    def __init__(
        self, hidden: int, intermediate: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.intermediate = intermediate
        self.gate_up = nn.Parameter(
            torch.empty(2 * intermediate, hidden, device=device, dtype=dtype), False
        )
        self.down = nn.Parameter(
            torch.empty(hidden, intermediate, device=device, dtype=dtype), False
        )

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """x, residual [T, E] → residual + mlp(x), [T, E]."""
        both = functional.linear(x, self.gate_up)
        gated = functional.silu(both[:, : self.intermediate]) * both[:, self.intermediate :]
        return torch.addmm(residual, gated, self.down.t())
