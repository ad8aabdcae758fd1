"""Poison: what a buffer holds until the kernel that fills it has run.

Floats and complex numbers get a NaN of a recognisable payload, integers a recognisable huge value,
bools True (no bit pattern of theirs is free, so theirs can't be told apart). Poison survives
copies, so it is still seen in what was computed from a buffer too early.
"""

import torch

_PATTERNS: dict[torch.dtype, tuple[torch.dtype, int]] = {
    torch.float64: (torch.int64, 0x7FF8_DEAD_DEAD_DEAD),
    torch.float32: (torch.int32, 0x7FC0_DEAD),
    torch.bfloat16: (torch.int16, 0x7FDE),
    torch.float16: (torch.int16, 0x7EDE),
    torch.int64: (torch.int64, 0x7DEA_DDEA_DDEA_DDEA),
    torch.int32: (torch.int32, 0x7DEA_DDEA),
    torch.int16: (torch.int16, 0x7DEA),
    torch.int8: (torch.int8, 0x6B),
    torch.uint8: (torch.uint8, 0xDB),
}
"""dtype → (integer dtype of its width, bits)."""


class PoisonRead(RuntimeError):
    """A value was read before the kernel that computes it had run."""


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill a fresh strided tensor in place, at once; returns it. Other layouts stay as they are."""
    if tensor.layout is not torch.strided or tensor.numel() == 0:
        return tensor
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if real.dtype is torch.bool:
        real.fill_(True)
    elif real.dtype in _PATTERNS:
        bits, value = _PATTERNS[real.dtype]
        real.view(bits).fill_(value)
    return tensor


def is_poison(tensor: torch.Tensor) -> torch.Tensor:
    """A bool tensor of the same shape (complex: and a last dimension of 2)."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    if real.dtype not in _PATTERNS:
        return torch.zeros_like(real, dtype=torch.bool)
    bits, value = _PATTERNS[real.dtype]
    return real.view(bits) == value


def check(tensor: torch.Tensor, what: str) -> None:
    """Raises `PoisonRead`, with how much of the tensor is poison."""
    if tensor.layout is not torch.strided:
        return
    with torch._C._DisableTorchDispatch():  # at once, whatever mode the caller is under
        poisoned = int(is_poison(tensor).sum())
    if poisoned:
        raise PoisonRead(
            f"{what}: {poisoned} of {tensor.numel()} values of a {tensor.dtype} tensor of shape "
            f"{tuple(tensor.shape)} were read before the kernel that computes them had run"
        )
