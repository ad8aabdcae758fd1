import pytest
import torch

from tests.support.engine_harness import Harness
from tests.support.toy_decoder import toy_decoder
from worker.api.model import BuildContext
from worker.api.registry import load_builder
from worker.device.cpu import CpuDevice
from worker.models.reference_hash import reference_tokens
from worker.resources.random_draws import gumbel_noise, row_keys

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def device():
    from worker.device.cuda import CudaDevice

    d = CudaDevice(0)
    yield d
    d.close()


def test_a_copy_waits_for_the_step_that_it_follows(device):
    with device.compute():
        x = torch.zeros(1000, device=device.torch_device).fill_(1)  # first uses are slow
        torch.cuda._sleep(500_000_000)
        x.fill_(3)
        event = device.new_event()
        event.record()
    assert not event.query()
    with device.readback():
        host = device.to_host(x, event)
    assert host.is_pinned()
    assert host.tolist() == [3] * 1000
    assert event.query()


def test_a_copy_without_an_event_follows_the_compute_stream(device):
    with device.compute():
        x = torch.zeros(10, device=device.torch_device).fill_(1)
        torch.cuda._sleep(500_000_000)
        x.fill_(4)
    assert device.to_host(x, None).tolist() == [4] * 10


def test_an_unrecorded_event_is_complete_and_memory_is_known(device):
    assert device.new_event().query()
    free, total = device.memory()
    assert 0 < free <= total
    assert not device.fatal(torch.OutOfMemoryError("CUDA error: out of memory"))
    assert device.fatal(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_the_reference_model_is_bit_identical_here(device):
    build = load_builder("reference")
    model = build(BuildContext("m", "", device.torch_device, torch.float32, None, {"key": 3}))
    h = Harness(model, pages=100, device=device)
    h.engine.warmup()
    prompts = {rid: [(rid * 7 + i) % 257 for i in range(10 * rid)] for rid in range(1, 9)}
    h.add(*prompts)
    h.step(prompts)
    for _ in range(40):
        h.step(list(prompts))
    for rid, prompt in prompts.items():
        assert h.out[rid] == reference_tokens(prompt, 41, key=3)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize(
    "params", [{}, {"temperature": 0.8, "top_p": 0.9, "top_k": 9}], ids=["greedy", "sampled"]
)
def test_a_decoder_gives_the_tokens_of_the_cpu_and_never_waits(device, params):
    outs = []
    for d in (CpuDevice(), device):
        h = Harness(toy_decoder(d.torch_device), pages=60, device=d)
        h.engine.warmup()
        h.add(1, 2, seed=1, **params)
        h.add(3)
        plans = [({1: [3] * 5, 2: [4] * 20}, (2,)), ({2: [5] * 30, 3: [7]}, ())]
        batches = [h.batch(rows, partial=partial) for rows, partial in plans]
        columns = []
        for step in range(25):
            batch = batches[step] if step < 2 else h.batch([1, 2, 3])
            if step == 1:
                batch.per_request_info[2].position = 20
            mode = "error" if d is device else "default"
            torch.cuda.set_sync_debug_mode(mode)
            try:
                h.engine.prepare_batch(batch)
                h.engine.exec_and_postprocess(batch)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            assert batch.error is None
            assert not batch.failed_requests
            for rid in batch.outputs:
                h.out[rid].append(0)
            columns.append(d.to_host(batch.outputs.columns["tokens"], batch.completion_event))
        h.engine.check()
        outs.append([c.tolist() for c in columns])
    assert outs[0] == outs[1]


def test_random_draws_are_those_of_the_cpu(device):
    import numpy as np

    low, high = (torch.from_numpy(k) for k in row_keys(np.arange(8, dtype=np.uint64), range(8)))
    here = gumbel_noise(low.to(device.torch_device), high.to(device.torch_device), 1000).cpu()
    assert torch.allclose(here, gumbel_noise(low, high, 1000), atol=1e-4, rtol=1e-4)
