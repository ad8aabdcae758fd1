"""The cpu-async device: launches, poison, views, writes, streams, events, errors, threads."""

import threading

import pytest
import torch
from torch.nn import functional

from protocol.config import parse
from protocol.errors import ConfigError
from tests.support.sequencer import Sequencer
from worker.device import poison
from worker.device.async_launch import NoLaunch, ValueRead
from worker.device.async_streams import AsyncDeviceError
from worker.device.cpu_async import CpuAsyncDevice
from worker.device.poison import PoisonRead, is_poison
from worker.process.loading import make_device


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


DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64,
    torch.int32, torch.int16, torch.int8, torch.uint8,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_outputs_are_poison_until_their_kernel_ran(device, seq, dtype):
    x = torch.ones(3, 4).to(dtype)
    seq.hold("compute:*")
    with device.compute():
        y = x + x
    assert y.shape == x.shape
    assert is_poison(y).all()
    if dtype.is_floating_point or dtype.is_complex:
        assert y.isnan().all()
    else:
        assert (y.abs() > 90).all()
    seq.release("compute:*")
    device.synchronize()
    assert y.tolist() == (x + x).tolist()
    assert not is_poison(y).any()


def test_a_read_before_completion_is_detected(device, seq):
    seq.hold("compute:*")
    with device.compute():
        x = torch.arange(5) * 2
        early, done = device.new_event(), device.new_event()
        done.record()
    with pytest.raises(PoisonRead, match="5 of 5 values") as caught:
        device.to_host(x, early)  # never recorded: nothing to wait for
    assert device.fatal(caught.value)
    assert not done.query()
    seq.release("compute:*")
    assert device.to_host(x, done).tolist() == [0, 2, 4, 6, 8]
    assert device.to_host(x, None).tolist() == [0, 2, 4, 6, 8]


def test_poison_is_seen_in_what_was_computed_from_it(device, seq):
    """A kernel of another stream that did not wait takes poison as its input."""
    other = device.new_stream("other")
    seq.hold("compute:*")
    with device.compute():
        x = torch.ones(4) * 3
        done = device.new_event()
        done.record()
    with device.stream(other):
        missing = x + 1
    other.synchronize()
    with pytest.raises(PoisonRead):
        device.to_host(missing, device.new_event())
    with device.stream(other):
        done.wait()
        right = x + 1
    seq.until_reached("other:wait")
    assert is_poison(right).all()
    seq.release("compute:*")
    other.synchronize()
    assert right.tolist() == [4.0] * 4


def test_a_host_copy_does_not_follow_its_source(device):
    with device.compute():
        x = torch.zeros(3)
        copy = device.to_host(x, None)
        x += 1
    assert copy.tolist() == [0, 0, 0]
    assert device.to_host(x, None).tolist() == [1, 1, 1]


def programs():
    """Views, in-place and mutating operators, as a plain CPU runs them."""

    def views():
        x = torch.arange(24.0).view(2, 3, 4)
        x[:, 1].mul_(10)
        x.transpose(0, 1)[2, :, 1:3] = -1
        a, b = x.flatten().chunk(2)
        a.add_(b)
        x.unflatten(-1, (2, 2)).select(-1, 0).zero_()
        return x, a.view(3, 4).t().reshape(-1), x.unbind(0)[1].expand(2, 3, 4).contiguous()

    def writes():
        x = torch.zeros(6, dtype=torch.int64)
        x.index_copy_(0, torch.tensor([4, 1]), torch.tensor([7, 8]))
        x[torch.tensor([0, 2])] = 5
        x.scatter_(0, torch.tensor([3]), 9)
        x.index_fill_(0, torch.tensor([5]), 3)
        out = torch.empty(6, dtype=torch.int64)
        torch.add(x, x, out=out)
        return x, out, x.masked_fill(x > 6, 0), torch.where(x > 6, 1.0, x.float())

    def several():
        x = torch.tensor([[3.0, 1.0, 2.0], [9.0, 8.0, 7.0]])
        values, index = x.sort(dim=-1, descending=True)
        best = x.topk(2)
        total, at = torch.max(x, dim=1)
        pair = torch.stack([values, index.float()])
        return values, index, best.values, best.indices, total, at, pair, *x.split([1, 2], 1)

    def fused():
        q = torch.linspace(-1, 1, 48).view(1, 2, 6, 4)
        mask = torch.ones(6, 6, dtype=torch.bool).tril()
        plain = functional.scaled_dot_product_attention(q, q, q, attn_mask=mask)
        causal = functional.scaled_dot_product_attention(q, q, q, is_causal=True)
        half = q.to(torch.bfloat16) @ q.to(torch.bfloat16).transpose(-1, -2)
        norm = functional.layer_norm(q, (4,))
        foreach = torch._foreach_add([q, norm], 1.0)
        torch._foreach_mul_(foreach, 2.0)
        return plain, causal, half, norm, *foreach, functional.silu(q, inplace=False)

    def complexes():
        x = torch.view_as_complex(torch.arange(8.0).view(4, 2))
        turned = x * torch.polar(torch.ones(4), torch.arange(4.0))
        return turned, torch.view_as_real(turned).flatten(-2)

    return [views, writes, several, fused, complexes]


@pytest.mark.parametrize("program", programs(), ids=lambda p: p.__name__)
def test_a_program_gives_what_the_cpu_gives(device, seq, program):
    with torch.no_grad():
        expected = program()
    seq.hold("compute:*")  # all of it is launched before any of it runs
    with device.compute():
        got = program()
        done = device.new_event()
        done.record()
    assert seq.passed("compute:*") == 0
    seq.release("compute:*")
    done.synchronize()
    assert len(got) == len(expected)
    for g, e in zip(got, expected, strict=True):
        assert (g.dtype, g.shape) == (e.dtype, e.shape)
        assert torch.equal(g, e)


def test_a_kernel_sees_its_arguments_when_it_runs(device, seq):
    """What is written to a host buffer after the launch is what the launch copies."""
    host = torch.zeros(3)
    seq.hold("compute:*")
    with device.compute():
        x = host.clone()
    host.fill_(7)
    seq.release("compute:*")
    device.synchronize()
    assert x.tolist() == [7.0] * 3


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: float(x[0]),
        lambda x: x[x > 0],
        lambda x: x.__setitem__(x > 0, 1.0),
        lambda x: bool((x > 0).all()),
        lambda x: x.nonzero(),
        lambda x: torch.equal(x, x),
        lambda x: x.masked_select(x > 0),
        torch.unique,
        lambda x: torch.repeat_interleave(x, x.long()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: list(x[0:1].__array__()),
        repr,
    ],
)
def test_a_launching_thread_may_not_read_a_value(device, read):
    x = torch.ones(3)
    for context in (device.compute(), device.stream(device.new_stream("plan"))):
        with context, pytest.raises(ValueRead, match="reads a tensor's value"):
            read(x)
    with device.readback():
        read(x)
    read(x)


def test_shapes_may_be_asked_anywhere(device):
    with device.compute():
        x = torch.zeros(2, 3)
        assert (x.shape, x.numel(), len(x), x.dtype) == ((2, 3), 6, 2, torch.float32)
        assert x.t().stride() == (1, 3)
        assert x.is_contiguous()


def test_a_read_on_the_readback_stream_waits_for_that_stream_alone(device, seq):
    with device.compute():
        x = torch.ones(2)
        done = device.new_event()
        done.record()
    done.synchronize()
    seq.hold("compute:*")
    with device.compute():
        y = x + 1
    with device.readback():
        assert (x + 2).tolist() == [3.0, 3.0]
        assert (x * 5).sum().item() == 10.0
        with pytest.raises(PoisonRead):
            y.tolist()
        with pytest.raises(PoisonRead):
            y.sum().item()


def test_random_operators_are_refused(device):
    with device.compute():
        for draw in (
            lambda: torch.rand(3),
            lambda: torch.empty(3).normal_(),
            lambda: torch.multinomial(torch.ones(3), 1),
            lambda: functional.dropout(torch.ones(3), 0.5),
        ):
            with pytest.raises(NoLaunch, match="random"):
                draw()
    assert torch.rand(3).shape == (3,)


def test_a_wrong_shape_is_told_at_the_launch_and_loses_nothing(device):
    with device.compute():
        x = torch.zeros(3)
        with pytest.raises(RuntimeError, match="broadcast a dimension of length 4"):
            x + torch.zeros(4)
        with pytest.raises(RuntimeError):
            x.add_(torch.zeros(4))
        y = x + 1
    assert device.to_host(y, None).tolist() == [1.0] * 3


def test_a_failed_kernel_is_sticky_and_surfaces_later(device, seq):
    other = device.new_stream("other")
    seq.hold("compute:*")
    with device.compute():
        x = torch.zeros(3).index_select(0, torch.tensor([5]))  # a kernel finds out, no launch does
        y = torch.full((3,), 2.0)
        done = device.new_event()
        done.record()
    seq.release("compute:*")
    for fails in (
        done.synchronize,
        done.query,
        device.synchronize,
        lambda: device.to_host(x, done),
    ):
        with pytest.raises(
            AsyncDeviceError, match=r"compute:index_select.*failed before"
        ) as caught:
            fails()
        assert isinstance(caught.value.__cause__, IndexError)
        assert device.fatal(caught.value)
    with device.stream(other), pytest.raises(AsyncDeviceError):
        torch.zeros(3)
    assert is_poison(y).all()  # kernels behind it were skipped
    assert not device.fatal(RuntimeError("an author's own"))


def test_waiters_of_a_lost_device_are_not_left_hanging(device, seq):
    seq.hold("compute:*")
    with device.compute():
        torch.zeros(3).index_select(0, torch.tensor([5]))
        done = device.new_event()
        done.record()
    raised = []

    def waits():
        try:
            done.synchronize()
        except AsyncDeviceError as e:
            raised.append(e)

    waiter = threading.Thread(target=waits)
    waiter.start()
    seq.release("compute:*")
    waiter.join(20)
    assert len(raised) == 1


def test_an_event_never_recorded_is_complete(device, seq):
    seq.hold("compute:*")
    event = device.new_event()
    assert event.query()
    event.synchronize()
    with device.compute():
        event.wait()
    assert seq.reached("compute:wait") == 0
    event.record()  # outside every stream: what this thread did is done
    assert event.query()


def test_a_wait_binds_to_the_record_before_it(device, seq):
    other = device.new_stream("other")
    seq.hold("compute:record", "other:wait")
    event = device.new_event()
    with device.compute():
        event.record()
    with device.stream(other):
        event.wait()
        torch.ones(1)
    with device.compute():
        event.record()
    seq.release("other:wait")
    seq.let("compute:record")
    seq.until_passed("other:ones")  # the second record is held still
    assert not event.query()
    seq.release("compute:record")
    event.synchronize()
    assert event.query()


def test_modes_and_streams_are_for_the_calling_thread_alone(device, seq):
    seen = []
    seq.hold("compute:*")
    with device.compute():
        assert not torch.is_grad_enabled()
        other = threading.Thread(
            target=lambda: seen.append((torch.is_grad_enabled(), torch.ones(2).sum().item()))
        )
        other.start()
        other.join()
    assert seen == [(True, 2.0)]
    assert torch.is_grad_enabled()


def test_contexts_nest(device):
    plan = device.new_stream("plan")
    with device.compute():
        with device.compute():
            x = torch.ones(3)
        with device.stream(plan), pytest.raises(ValueRead):
            x.tolist()
        with device.readback():
            device.synchronize()
            assert x.tolist() == [1.0] * 3
        with pytest.raises(ValueRead):
            x.tolist()
    assert x.tolist() == [1.0] * 3


def test_close_runs_what_is_queued_and_ends_the_threads():
    device = CpuAsyncDevice()
    before = threading.active_count()
    with device.compute():
        x = torch.ones(3) + 1
    device.close()
    device.close()
    assert x.tolist() == [2.0] * 3
    assert threading.active_count() == before - 2


def test_memory_is_known(device):
    free, total = device.memory()
    assert 0 < free <= total


def test_a_bool_has_no_poison():
    assert not is_poison(poison.poison(torch.empty(3, dtype=torch.bool))).any()


def test_a_configuration_may_ask_for_it():
    models = {"m": {"kind": "reference"}}
    config = parse({"models": models, "workers": [{"name": "w0", "device": "cpu-async"}]})
    assert config.workers != "auto"
    device = make_device(config.workers[0].device)
    assert isinstance(device, CpuAsyncDevice)
    device.close()
    with pytest.raises(ConfigError, match="device"):
        parse({"models": models, "workers": [{"name": "w0", "device": "cpu-sync"}]})
