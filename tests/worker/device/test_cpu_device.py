import threading

import torch

from worker.device.base import Device
from worker.device.cpu import CpuDevice


def test_the_cpu_device_is_inline():
    device: Device = CpuDevice()
    event = device.new_event()
    assert event.query()
    with device.compute():
        assert not torch.is_grad_enabled()
        event.record()
    event.synchronize()
    assert event.query()
    with device.readback():
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    free, total = device.memory()
    assert 0 < free <= total
    assert not device.fatal(RuntimeError("CUDA error: unspecified launch failure"))
    device.close()


def test_a_host_copy_does_not_follow_its_source():
    device = CpuDevice()
    x = torch.zeros(3)
    copy = device.to_host(x, device.new_event())
    x += 1
    assert copy.tolist() == [0, 0, 0]
    assert device.to_host(x, None).tolist() == [1, 1, 1]


def test_modes_are_for_the_calling_thread_alone():
    device, seen = CpuDevice(), []
    with device.compute():
        other = threading.Thread(target=lambda: seen.append(torch.is_grad_enabled()))
        other.start()
        other.join()
    assert seen == [True]
