"""Graphs of the cpu-async device: capture runs nothing, Python is baked out, buffers stay."""

import pytest
import torch

from tests.support.sequencer import Sequencer
from worker.device.async_launch import NoLaunch, ValueRead
from worker.device.async_streams import AsyncDeviceError
from worker.device.cpu import CpuDevice
from worker.device.cpu_async import CpuAsyncDevice
from worker.device.poison import is_poison


@pytest.fixture
def seq():
    s = Sequencer()
    yield s
    s.open()


@pytest.fixture
def device(seq):
    d = CpuAsyncDevice(seq.gate)
    yield d
    seq.open()
    d.close()


def test_capture_runs_nothing(device, seq):
    x = torch.ones(3)
    graph = device.capture(lambda: x.add_(1) * 2)
    device.synchronize()
    assert x.tolist() == [1.0] * 3
    assert is_poison(graph.outputs).all()
    assert graph.names == ["add_", "mul"]
    assert seq.trace == ["compute:synchronize", "readback:synchronize"]


def test_a_replay_runs_over_the_same_buffers(device):
    x = torch.ones(3)
    graph = device.capture(lambda: x * 2 + 1)
    for value in (3.0, 4.0):
        with device.compute():
            x.fill_(value)
            graph.replay()
        assert device.to_host(graph.outputs, None).tolist() == [2 * value + 1] * 3


def test_python_is_baked_out(device):
    calls, double = [], True
    x = torch.ones(2)

    def step():
        calls.append(len(calls))
        return x * 2 if double else x * 100 + len(calls)

    graph = device.capture(step)
    double = False
    with device.compute():
        graph.replay()
        graph.replay()
    assert calls == [0]
    assert device.to_host(graph.outputs, None).tolist() == [2.0] * 2


def test_a_buffer_made_anew_is_not_what_the_graph_reads(device):
    """The hazard that E6 orders warm-up for: a replay follows addresses, not names."""
    kept = {"x": torch.ones(2)}
    graph = device.capture(lambda: kept["x"] + 1)
    kept["x"] = torch.full((2,), 9.0)
    with device.compute():
        graph.replay()
    assert device.to_host(graph.outputs, None).tolist() == [2.0] * 2


def test_a_replay_launches_and_returns(device, seq):
    x = torch.ones(2)
    graph = device.capture(lambda: x + 1)
    seq.hold("graph:add")
    with device.compute():
        graph.replay()
        done = device.new_event()
        done.record()
    seq.until_reached("graph:add")
    assert not done.query()
    seq.release("graph:add")
    done.synchronize()
    assert graph.outputs.tolist() == [2.0] * 2


def test_a_replay_waits_for_the_event_that_it_was_told_of(device, seq):
    x = torch.zeros(2)
    graph = device.capture(lambda: x + 1)
    plan, planned = device.new_stream("plan"), device.new_event()
    seq.hold("plan:fill_")
    with device.stream(plan):
        x.fill_(5)
        planned.record()
    with device.compute():
        planned.wait()
        graph.replay()
    seq.until_reached("compute:wait")
    seq.release("plan:fill_")
    assert device.to_host(graph.outputs, None).tolist() == [6.0] * 2
    assert seq.trace.index("plan:fill_") < seq.trace.index("compute:replay")


@pytest.mark.parametrize(
    "forbidden",
    [
        lambda d, x: d.new_event().record(),
        lambda d, x: d.new_event().wait(),
        lambda d, x: d.to_host(x, None),
        lambda d, x: d.capture(lambda: x + 1).replay(),
        lambda d, x: d.stream(d.new_stream("plan")).__enter__(),
        lambda d, x: d.readback().__enter__(),
        lambda d, x: x.sum().item(),
        lambda d, x: x.tolist(),
        lambda d, x: torch.rand(3),
    ],
    ids=["record", "wait", "to_host", "replay", "stream", "readback", "item", "tolist", "rand"],
)
def test_what_cannot_be_captured_is_refused(device, forbidden):
    x = torch.ones(2)
    with pytest.raises((RuntimeError, ValueRead, NoLaunch)):
        device.capture(lambda: forbidden(device, x))
    with device.compute():
        y = x + 1  # the thread is out of the capture again
    assert device.to_host(y, None).tolist() == [2.0] * 2


def test_the_compute_stream_may_be_entered_within_a_capture(device):
    x = torch.ones(2)

    def step():
        with device.compute():
            return x + 1

    graph = device.capture(step)
    device.synchronize()
    assert is_poison(graph.outputs).all()
    assert len(graph) == 1


def test_a_kernel_that_fails_in_a_replay_is_sticky(device):
    index = torch.tensor([1])
    graph = device.capture(lambda: torch.zeros(3).index_select(0, index))
    with device.compute():
        graph.replay()
    assert device.to_host(graph.outputs, None).tolist() == [0.0]
    index.fill_(7)
    with device.compute():
        graph.replay()
    with pytest.raises(AsyncDeviceError, match="compute:replay"):
        device.synchronize()
    with device.compute(), pytest.raises(AsyncDeviceError):
        graph.replay()


def test_a_replay_needs_a_stream(device):
    graph = device.capture(lambda: torch.ones(2))
    with pytest.raises(RuntimeError, match="enter one first"):
        graph.replay()


def test_the_cpu_device_has_no_graphs_and_one_stream():
    device = CpuDevice()
    assert not device.captures
    with pytest.raises(RuntimeError, match="no graphs"):
        device.capture(lambda: None)
    stream, event = device.new_stream("plan"), device.new_event()
    with device.stream(stream):
        assert not torch.is_grad_enabled()
        event.wait()
        x = torch.ones(2) + 1
    stream.synchronize()
    assert x.tolist() == [2.0] * 2
