"""One step's tokens, from the device to the host in one copy."""

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.errors import RequestFailed
from worker.device.base import Device
from worker.engine.executing_batch import ExecutingBatch

TOKENS = "tokens"  # the output that travels


def read_tokens(batch: ExecutingBatch, device: Device) -> tuple[list[int], NDArray[np.int64]]:
    """Rows with an output and the token of each. Waits for the step's device work, even if there is
    nothing to read; raises what that work raised. Postprocess thread.

    A row whose outputs are not one token is recorded as failed.
    """
    out = batch.outputs
    rows: list[int] = []
    values: list[NDArray[np.int64]] = []
    column = out.columns.get(TOKENS)
    if column is not None:
        kept = [i for i, r in enumerate(out.request_ids) if out.row_of(r) is not None]
        rows += [out.request_ids[i] for i in kept]
        host = _to_host(column, batch, device)
        values.append(host if len(kept) == len(host) else host[kept])
    elif batch.completion_event is not None:
        batch.completion_event.synchronize()
    if len(out) > len(rows):
        loose = _loose_rows(batch)
        if loose:
            # The event first: joining is device work of its own, on another stream.
            if batch.completion_event is not None:
                batch.completion_event.synchronize()
            with device.readback():
                joined = torch.cat(list(loose.values()))
            rows += list(loose)
            values.append(_to_host(joined, batch, device))
    return rows, np.concatenate(values) if values else np.zeros(0, np.int64)


def _to_host(tensor: torch.Tensor, batch: ExecutingBatch, device: Device) -> NDArray[np.int64]:
    with device.readback():
        host = device.to_host(tensor, batch.completion_event)
    return host.numpy().reshape(-1).astype(np.int64, copy=False)


def _loose_rows(batch: ExecutingBatch) -> dict[int, torch.Tensor]:
    """Outputs that are no column: of the unbatched path, or replaced by the author. Each [1]."""
    out = batch.outputs
    loose: dict[int, torch.Tensor] = {}
    for rid in [r for r in out if out.row_of(r) is None]:
        found = out[rid].get(TOKENS)
        if not found:
            continue
        if len(found) != 1 or found[0].numel() != 1:
            error = RequestFailed(f"output {TOKENS!r}: one token a step is expected")
            batch.fail(rid, "outputs", error)
        else:
            loose[rid] = found[0].reshape(1)
    return loose
