import pytest
import torch
from torch.nn import functional

from worker.layers.linear import Linear, product_for
from worker.layers.rms_norm import RMSNorm
from worker.layers.rotary import RotaryTable, rotate

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 33])
def test_packed_linear(dtype: torch.dtype, rows: int) -> None:
    layer = Linear(48, 80, device=CPU, dtype=dtype)
    w = torch.randn(80, 48).to(dtype)
    layer.weight.data.copy_(w)
    layer.pack()
    x = torch.randn(rows, 48).to(dtype)
    torch.testing.assert_close(layer(x), functional.linear(x, w), atol=1e-4, rtol=1e-4)


def test_only_float32_on_a_cpu_leaves_linear() -> None:
    assert product_for(torch.zeros(4, 4, dtype=torch.bfloat16)) is functional.linear
    assert product_for(torch.zeros(4, 4, device="meta")) is functional.linear


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e4])
def test_rms_norm(dtype: torch.dtype, scale: float) -> None:
    norm = RMSNorm(96, 1e-5, device=CPU, dtype=dtype)
    norm.weight.data.copy_(torch.rand(96) + 0.5)
    x = (torch.randn(7, 96) * scale).to(dtype)
    expected = functional.rms_norm(x, (96,), norm.weight, 1e-5)
    torch.testing.assert_close(norm(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotate_turns_each_pair_by_its_frequency(dtype: torch.dtype) -> None:
    table = RotaryTable(64, 8, 100.0, (1.0, 1.0, 1.0, 4.0), device=CPU)
    x = torch.randn(3, 2, 8).to(dtype)
    positions = torch.tensor([0, 5, 63])
    found = rotate(x, table.at(positions))
    assert found.dtype == dtype
    for t, p in enumerate(positions.tolist()):
        for i, frequency in enumerate((1.0, 100.0**-0.25, 100.0**-0.5, 100.0**-0.75 / 4)):
            a = torch.tensor(p * frequency)
            u, v = x[t, :, 2 * i].float(), x[t, :, 2 * i + 1].float()
            expected = torch.stack([u * a.cos() - v * a.sin(), u * a.sin() + v * a.cos()], -1)
            got = found[t, :, 2 * i : 2 * i + 2].float()
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(got, expected, atol=tolerance, rtol=tolerance)
