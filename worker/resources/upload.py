"""Host arrays to the device, without waiting for it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[torch.Tensor]:
    """Arrays of one dtype → tensors of the same shapes, by a single copy.

    On a CPU the tensors alias the arrays, so pass fresh ones. On a GPU the pinned block goes back
    to its pool only when the copy has run (the caching host allocator keeps an event), so nothing
    here is written while the device may still read it.
    """
    if device.type == "cpu":
        return [torch.from_numpy(a) for a in arrays]
    flat = torch.from_numpy(np.concatenate([a.reshape(-1) for a in arrays]))
    moved = flat.pin_memory().to(device, non_blocking=True)
    parts = moved.split([a.size for a in arrays])
    return [p.view(a.shape) for p, a in zip(parts, arrays, strict=True)]
