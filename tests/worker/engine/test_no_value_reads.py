"""E26: nothing on the GPU thread reads a tensor's value, which would wait for the device."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.engine_harness import Harness, one_node, reference
from tests.support.toy_decoder import ToyDecoder, toy_decoder
from tests.worker.models.llama_files import write_hf
from worker.api.model import BuildContext
from worker.api.registry import load_builder

READS = {
    "_local_scalar_dense",
    "item",
    "nonzero",
    "nonzero_numpy",
    "equal",
    "masked_select",
    "is_nonzero",
    "unique_dim",
    "_unique2",
    "bincount",
    "repeat_interleave",
}


class NoReads(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket._qualified_op_name.split("::")[1]
        if name in READS:
            raise AssertionError(f"{name} reads a tensor's value")
        indexes = args[1] if name in ("index", "index_put", "index_put_") else ()
        if any(i is not None and i.dtype is torch.bool for i in indexes):
            raise AssertionError(f"{name} by a boolean mask reads its values")
        return func(*args, **(kwargs or {}))


class NoListing(TorchFunctionMode):
    """Calls that read a host tensor without any operator."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__):
            raise AssertionError(f"{func.__name__} reads a tensor's values")
        return func(*args, **(kwargs or {}))


def run(h, batch):
    with NoReads(), NoListing():
        h.engine.prepare_batch(batch)
        h.engine.exec_and_postprocess(batch)
    assert batch.error is None
    assert not batch.failed_requests
    for rid in batch.request_ids:
        h.position[rid] += batch.inputs[rid].span


def llama(tmp_path):
    context = BuildContext(
        "m", str(write_hf(tmp_path / "m")), torch.device("cpu"), torch.float32, None, {}
    )
    return load_builder("decoder_lm")(context)


@pytest.mark.parametrize(
    "make",
    [lambda _: reference(eos_every=5), lambda _: toy_decoder(), llama],
    ids=["r", "d", "llama"],
)
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 5}], ids=["greedy", "sampled"]
)
def test_no_step_reads_a_value(make, params, tmp_path):
    h = Harness(make(tmp_path), pages=50)
    h.add(1, 2, **params)
    h.add(3)
    run(h, h.batch({1: [3] * 5, 2: [4] * 20}, partial=[2]))
    run(h, h.batch({2: [5] * 17, 3: [7]}))
    for _ in range(20):
        run(h, h.batch([1, 2, 3]))
    run(h, h.batch([3, 1]))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
    ],
)
def test_the_detector_detects(read):
    class Reads(ToyDecoder):
        def forward_batched(self, engine, **tensors):
            read(tensors["tokens"])
            return super().forward_batched(engine, **tensors)

    model = toy_decoder()
    h = Harness(one_node(Reads(), *model.resources), pages=9)
    h.add(1)
    with pytest.raises(AssertionError):
        run(h, h.batch({1: [1, 2]}))
