"""The fused kernels on a CPU, against the operations in torch. Triton must be imported with
``TRITON_INTERPRET=1``, so ``test_fused.py`` runs this in a process of its own."""

from __future__ import annotations

import pytest
import torch

from pageloom.ops import fused
from pageloom.ops.activation import silu_and_mul
from pageloom.ops.norm import add_rms_norm
from pageloom.ops.rope import RotaryTable, norm_rotate_, rotate_
from triton_interpreter import replace_language_once

replace_language_once()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Two roundings of the last bit, where torch rounds intermediate results and a kernel does not.
TOLERANCE = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 3e-2, "rtol": 2e-2},
    torch.float16: {"atol": 4e-3, "rtol": 3e-3},
}
EPS = 1e-5


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 576), (2, 2, 1000)])
def test_add_rms_norm(dtype, shape):
    x, residual = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    weight = torch.rand(shape[-1]).to(dtype)
    before, expected_residual = x.clone(), residual.clone()
    expected = add_rms_norm(x, expected_residual, weight, EPS)
    found = fused.add_rms_norm(x, residual, weight, EPS)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    torch.testing.assert_close(residual, expected_residual, **TOLERANCE[dtype])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(4, 2, 64), (9, 3, 80), (1, 1, 16)])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_of_q_and_k_where_they_lie(dtype, heads, kv_heads, size, normed):
    table = RotaryTable(1e4 ** -torch.rand(size // 2), 1.2, 100, dtype, torch.device("cpu"))
    cos, sin = table.at(torch.tensor([0, 99, 17]))
    merged = torch.randn(3, heads + 2 * kv_heads, size).to(dtype)
    rotated, rest = merged.split([heads + kv_heads, kv_heads], 1)
    weight, values = torch.rand(heads + kv_heads, size).to(dtype), rest.clone()
    if normed:
        expected = norm_rotate_(rotated.clone(), weight, EPS, cos, sin)
        found = fused.rotate_(rotated, cos, sin, weight, EPS)
    else:
        expected = rotate_(rotated.clone(), cos, sin)
        found = fused.rotate_(rotated, cos, sin)
    torch.testing.assert_close(found, expected, **TOLERANCE[dtype])
    assert found.data_ptr() == merged.data_ptr()
    assert torch.equal(rest, values)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1536])
def test_silu_and_mul(dtype, size):
    gate_up = (torch.randn(3, 2 * size) * 4).to(dtype)
    before = gate_up.clone()
    torch.testing.assert_close(
        fused.silu_and_mul(gate_up), silu_and_mul(gate_up), **TOLERANCE[dtype]
    )
    assert torch.equal(gate_up, before)


def test_no_rows_are_no_launch():
    assert fused.silu_and_mul(torch.empty(0, 8)).shape == (0, 4)
    assert fused.add_rms_norm(*torch.empty(2, 0, 8), torch.ones(8), EPS).shape == (0, 8)
    assert fused.rotate_(torch.empty(0, 2, 8), *torch.empty(2, 0, 1, 8)).shape == (0, 2, 8)
