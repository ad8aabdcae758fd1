"""Root-mean-square normalization."""

import torch
from torch import nn
from torch.nn import functional


class RMSNorm(nn.Module):
    """x [T, E] → x / sqrt(mean(x²) + eps) * weight, over the last dimension.

    In float32 on a CPU it is spelled out in four operations: torch's own takes seven there (it is
    fused on a GPU only), and ten times as long for 512 rows of 576 (0.8 ms and 0.06 ms).
    """

    eps_tensor: torch.Tensor

    def __init__(self, size: int, eps: float, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype), False)
        self.size, self.eps = size, eps
        self._spelled_out = device.type == "cpu" and dtype == torch.float32
        self.register_buffer("eps_tensor", torch.tensor(eps, device=device, dtype=dtype), False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self._spelled_out:
            return functional.rms_norm(x, (self.size,), self.weight, self.eps)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        mean_square = torch.addcmul(self.eps_tensor, norm, norm, value=1 / self.size)
        return (x * self.weight).mul_(mean_square.rsqrt_())
