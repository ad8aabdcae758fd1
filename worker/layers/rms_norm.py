"""Root-mean-square normalization."""

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """x [T, E] → x / rms(x) * weight, over the last dimension."""

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype), False)
        self.eps = eps
        self.shape = (size,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(x, self.shape, self.weight, self.eps)
