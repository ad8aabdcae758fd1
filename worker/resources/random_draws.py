"""Stateless random draws: a function of (seed, output position, vocabulary index) and no more.

So a row's draw is the same alone or in any batch, on any device, and after a replay elsewhere.
Rows get two 32-bit keys from (seed, position) on the host; the device mixes each with the
vocabulary index by 32-bit integer arithmetic, which wraps alike everywhere.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)

# The golden ratio's, and murmur3's finalizer's constants, as signed 32-bit numbers.
_STEP_32 = 0x9E3779B9 - (1 << 32)
_FINAL_1 = 0x85EBCA6B - (1 << 32)
_FINAL_2 = 0xC2B2AE35 - (1 << 32)


def row_keys(
    seeds: npt.NDArray[np.uint64], positions: Sequence[int]
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Two int32 keys a row: splitmix64 of the seed's own stream, at `position`."""
    at = np.array(positions, np.uint64)
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds + _GOLDEN) + (at + np.uint64(1)) * _GOLDEN)
    low = (mixed & np.uint64(0xFFFFFFFF)).astype(np.uint32).view(np.int32)
    high = (mixed >> np.uint64(32)).astype(np.uint32).view(np.int32)
    return low, high


def _splitmix(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def gumbel_noise(low_S: torch.Tensor, high_S: torch.Tensor, vocab: int) -> torch.Tensor:
    """[S, V] float32 standard Gumbel noise: argmax(logits + noise) draws from softmax(logits).

    Through E = -log(1 - u) with u in (0, 1) from 31 bits: E is finest where it is small, which is
    where the winner lies, so a rare token keeps its probability.
    """
    x = torch.arange(vocab, device=low_S.device, dtype=torch.int32).mul_(_STEP_32)
    x = x[None] + low_S[:, None]
    _fold(x, 16).mul_(_FINAL_1)
    x ^= high_S[:, None]
    _fold(x, 13).mul_(_FINAL_2)
    _fold(x, 16)
    u = x.bitwise_and_(0x7FFFFFFF).to(torch.float32)
    u.add_(0.5).mul_(2.0**-31).clamp_(max=1.0 - 2.0**-24)
    return u.neg_().log1p_().neg_().log_().neg_()


def _fold(x: torch.Tensor, bits: int) -> torch.Tensor:
    """x ^= x >>> bits, in place: a logical shift of a signed number is a masked arithmetic one."""
    x ^= (x >> bits).bitwise_and_((1 << (32 - bits)) - 1)
    return x
