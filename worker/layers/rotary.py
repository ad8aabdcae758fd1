"""Rotary position embedding over interleaved pairs.

Elements 2i and 2i + 1 of a head are one complex number, and a position turns it by position ×
frequency i: one complex product for q and k together. Checkpoints in half-split order (element i
with i + D/2) are the same model with q and k rows permuted, which the loader does; scores are sums
over a head, so the order within it changes nothing else.
"""

import torch
from torch import nn


class RotaryTable(nn.Module):
    """Turns for positions 0 … `positions` - 1, [positions, D / 2] complex64, computed once.

    `factors` [D / 2] divide the frequencies (llama3 scaling).
    """

    turns: torch.Tensor

    def __init__(
        self,
        positions: int,
        head_dim: int,
        theta: float,
        factors: tuple[float, ...] | None,
        *,
        device: torch.device,
    ) -> None:
        super().__init__()
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        frequencies = 1.0 / theta**exponents
        if factors is not None:
            frequencies = frequencies / torch.tensor(factors, device=device)
        angles = torch.outer(
            torch.arange(positions, dtype=torch.float32, device=device), frequencies
        )
        self.register_buffer("turns", torch.polar(torch.ones_like(angles), angles), False)

    def at(self, positions: torch.Tensor) -> torch.Tensor:
        """positions [T] → turns [T, 1, D / 2], for `rotate` in every layer."""
        return self.turns[positions].unsqueeze(1)


def rotate(x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """x [T, N, D] in any float dtype, turned by `turns` [T, 1, D / 2] in float32; same dtype."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
