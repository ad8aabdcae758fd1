"""What every device promises, on each that this machine has."""

import pytest
import torch

from worker.device.base import Device
from worker.device.cpu import CpuDevice
from worker.device.cpu_async import CpuAsyncDevice

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def make(name: str) -> Device:
    if name == "cuda":
        from worker.device.cuda import CudaDevice

        return CudaDevice(0)
    return CpuDevice() if name == "cpu" else CpuAsyncDevice()


@pytest.fixture(params=["cpu", "cpu-async", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])])
def device(request: pytest.FixtureRequest):
    d = make(request.param)
    yield d
    d.close()


def ones(device: Device, n: int = 3) -> torch.Tensor:
    return torch.ones(n, device=device.torch_device)


def test_an_event_never_recorded_is_complete(device: Device) -> None:
    event = device.new_event()
    assert event.query()
    event.synchronize()
    with device.compute():
        event.wait()
        x = ones(device) + 1
    assert device.to_host(x, None).tolist() == [2.0] * 3


def test_a_copy_follows_its_event(device: Device) -> None:
    with device.compute():
        x = ones(device, 100_000)
        for _ in range(30):
            x = x + 1
        event = device.new_event()
        event.record()
    with device.readback():
        host = device.to_host(x, event)
    assert host.eq(31).all()
    assert event.query()


def test_streams_are_ordered_by_events_alone(device: Device) -> None:
    plan = device.new_stream("plan")
    planned, used = device.new_event(), device.new_event()
    x = ones(device)
    seen = []
    for step in range(5):
        with device.stream(plan):
            assert not torch.is_grad_enabled()
            used.wait()
            x.fill_(step)
            planned.record()
        with device.compute():
            planned.wait()
            seen.append(x * 10)
            used.record()
    plan.synchronize()
    assert [device.to_host(s, None).tolist() for s in seen] == [[10.0 * n] * 3 for n in range(5)]


def test_a_graph_replays_over_its_buffers_and_no_python(device: Device) -> None:
    x, calls = ones(device), []

    def step() -> torch.Tensor:
        calls.append(1)
        return x * 2 + len(calls)

    with device.compute():
        step()
    if not device.captures:
        with pytest.raises(RuntimeError, match="no graphs"):
            device.capture(step)
        return
    graph = device.capture(step)
    assert len(calls) == 2
    for value in (3.0, 4.0):
        with device.compute():
            x.fill_(value)
            graph.replay()
            kept = graph.outputs.clone()
        assert device.to_host(kept, None).tolist() == [2 * value + 2] * 3
    assert len(calls) == 2


def test_capture_runs_nothing(device: Device) -> None:
    if not device.captures:
        pytest.skip("no graphs")
    x = ones(device)
    with device.compute():
        x.clone().add_(1)
    graph = device.capture(lambda: x.add_(1))
    assert device.to_host(x, None).tolist() == [1.0] * 3
    with device.compute():
        graph.replay()
        graph.replay()
    assert device.to_host(x, None).tolist() == [3.0] * 3


def test_a_replay_waits_for_the_plan_of_another_stream(device: Device) -> None:
    if not device.captures:
        pytest.skip("no graphs")
    x, plan, planned = ones(device), device.new_stream("plan"), device.new_event()
    with device.compute():
        x.add(1)
    graph = device.capture(lambda: x + 1)
    with device.stream(plan):
        for n in range(50):
            x.fill_(n)
        planned.record()
    with device.compute():
        planned.wait()
        graph.replay()
    assert device.to_host(graph.outputs, None).tolist() == [50.0] * 3
