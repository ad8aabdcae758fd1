"""GGML blocks → float32, through the `gguf` package; F32, F16 and BF16 are copied as they lie."""

import math
from functools import cache

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

Kind = GGMLQuantizationType

_NATIVE = {Kind.F32: torch.float32, Kind.F16: torch.float16, Kind.BF16: torch.bfloat16}
_ROW = 256  # blocks


@cache
def block_sizes(kind: int) -> tuple[int, int] | None:
    """(weights, bytes) of one block of a GGML type; None: a type that cannot be dequantized."""
    try:
        known = Kind(kind)
        sizes = GGML_QUANT_SIZES[known]
    except (ValueError, KeyError):
        return None
    if known in _NATIVE:
        return sizes
    try:  # `gguf` has no list of what it can dequantize; one block of zeros tells
        gguf.quants.dequantize(np.zeros((1, sizes[1]), np.uint8), known)
    except NotImplementedError:
        return None
    return sizes


def kind_name(kind: int) -> str:
    """A GGML type as its users write it, such as Q4_1."""
    try:
        return Kind(kind).name
    except ValueError:
        return f"type {kind}"


def dequantize_into(out: torch.Tensor, raw: np.ndarray, kind: int) -> None:
    """Fill `out` (any shape) from `raw`, the tensor's bytes (uint8, 1-d, whole blocks)."""
    known = Kind(kind)
    if known in _NATIVE:
        out.copy_(torch.from_numpy(raw).view(_NATIVE[known]).view(out.shape))
        return
    # `gguf` works on 16 rows at a time. Blocks know no rows, so they are handed over in rows of
    # our own: a small model's true rows are so short that half of the time goes to the calls, and
    # one row for all would hold every intermediate at the tensor's full size.
    _, size = GGML_QUANT_SIZES[known]
    rows = raw.reshape(-1, math.gcd(raw.size // size, _ROW) * size)
    out.copy_(torch.from_numpy(gguf.quants.dequantize(rows, known)).view(out.shape))
