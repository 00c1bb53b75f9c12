"""`TritonLinear` on a CPU. Triton must be imported with ``TRITON_INTERPRET=1``, so
``test_packed_triton.py`` runs this in a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from packed_checkpoints import logits_of
from test_awq import awq, write_awq
from test_packed import CPU, DTYPES, exact, needs_compiler, random_rows
from test_packed import random_weight as random_weight_of

from pageloom_quant import packed
from pageloom_quant.packed import PackedWeight, packed_linear, triton
from pageloom_quant.packed.cpu import CPULinear
from pageloom_quant.packed.reference import ReferenceLinear
from pageloom_quant.packed.triton import Chip, TritonLinear
from triton_interpreter import replace_language_once

replace_language_once()

FORMATS = [  # inputs, group, symmetric, dtype of scales
    (192, 32, False, torch.float16),
    (192, 64, True, torch.float32),
    (192, 192, False, torch.bfloat16),
    (192, 96, True, torch.bfloat16),
    (512, 128, False, torch.float16),
    (256, 256, False, torch.float32),
]


def random_weight(*arguments, symmetric=False, scales=torch.float16, **sizes) -> PackedWeight:
    return random_weight_of(*arguments, symmetric=symmetric, dtype=scales, **sizes)


def make(weight, bias=None, dtype=torch.float32) -> TritonLinear:
    return TritonLinear(weight, bias, dtype, CPU)


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, exact_offsets: bool) -> None:
    """As in ``test_packed.py``, but the interpreter rounds to bfloat16 towards 0."""
    assert found.dtype in DTYPES
    step = torch.finfo(found.dtype).eps / (1 if found.dtype == torch.bfloat16 else 2)
    slack = 4e-6 if exact_offsets or found.dtype == torch.float32 else 4e-4
    assert ((found.double() - expected).abs() <= expected.abs() * step * 1.01 + slack).all()


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("inputs", "group", "symmetric", "scales"), FORMATS)
def test_products_of_few_rows_are_rounded_once(bits, inputs, group, symmetric, scales):
    for dtype, outputs, rows in zip(DTYPES, (70, 1, 129), (7, 16, 1), strict=True):
        weight = random_weight(
            outputs, inputs, bits=bits, group=group, symmetric=symmetric, scales=scales
        )
        bias = torch.linspace(-1, 1, outputs).to(dtype) if symmetric else None
        x = random_rows(rows, inputs, dtype)
        found = make(weight, bias, dtype)(x)
        assert_rounded(found, exact(x, weight, bias), symmetric)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_many_rows_are_multiplied_by_weights_that_are_rounded(bits, dtype):
    step, bias = torch.finfo(dtype).eps, torch.linspace(-1, 1, 130).to(dtype)
    for rows, group, symmetric in ((17, 32, True), (33, 64, False), (131, 192, False)):
        weight = random_weight(130, 192, bits=bits, group=group, symmetric=symmetric)
        x = random_rows(rows, 192, dtype)
        expected = exact(x, weight, bias)
        terms = x.double().abs() @ weight.dequantize(torch.float32).double().abs().T
        error = (make(weight, bias, dtype)(x).double() - expected).abs()
        assert (error <= (terms + expected.abs()) * step + 4e-6).all()


@pytest.mark.parametrize("rows", [1, 5, 20])
def test_inputs_are_split_where_programs_are_few(monkeypatch, rows):
    weight, bias = random_weight(10, 1664, group=128), torch.linspace(-1, 1, 10)
    x = random_rows(rows, 1664)
    whole = make(weight, bias)(x)
    monkeypatch.setattr(triton, "INTERPRETER", Chip("interpreter", processors=24))
    layer, splits = make(weight, bias), []
    add = layer._kernels.add_kernel

    class Watched:
        def __getitem__(self, grid):
            return lambda *given, **named: splits.append(given[5]) or add[grid](*given, **named)

    monkeypatch.setattr(layer._kernels, "add_kernel", Watched())
    found = layer(x)
    assert splits == [3]  # of 26 steps of 64 inputs, none of less than 512
    torch.testing.assert_close(found, whole)
    assert torch.equal(layer(x), found)
    if rows <= triton.FEW_ROWS:
        torch.testing.assert_close(layer(x[-1]), found[-1])


@pytest.mark.parametrize("bits", [4, 8])
def test_a_row_does_not_depend_on_its_neighbours(bits):
    """But for the last bit: the interpreter has numpy multiply, whose sums depend on the place."""
    weight, x = random_weight(10, 128, bits=bits, group=64), random_rows(16, 128)
    layer = make(weight)
    expected = layer(x)
    for rows in (1, 3, 8, 13):
        torch.testing.assert_close(layer(x[2 : 2 + rows]), expected[2 : 2 + rows])


def test_rows_may_be_strided_none_or_in_more_dimensions():
    layer, x = make(random_weight(40, 64)), random_rows(6, 128)
    part = x[:, 32:96]
    assert torch.equal(layer(part), layer(part.contiguous()))
    assert torch.equal(layer(x.T[:64].T), layer(x[:, :64].contiguous()))
    assert layer(part[:0]).shape == (0, 40)
    assert torch.equal(layer(part.unflatten(0, (2, 3))).view(6, 40), layer(part))


def test_rows_of_another_size_or_dtype_are_refused():
    layer = make(random_weight(40, 64), dtype=torch.bfloat16)
    for x in (torch.zeros(2, 64), torch.zeros(2, 32, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"64 inputs in torch\.bfloat16 cannot multiply"):
            layer(x)


@pytest.mark.parametrize("poison", [torch.inf, torch.nan])
@pytest.mark.parametrize("rows", [3, 18])
def test_what_is_not_finite_stays_in_its_row(poison, rows):
    weight, x = random_weight(40, 64), random_rows(rows, 64)
    x[rows - 1, 7] = poison
    found = make(weight)(x)
    assert not found[-1].isfinite().any()
    assert found[:-1].isfinite().all()


def test_a_cpu_gets_it_only_where_it_is_asked_for():
    assert not isinstance(packed_linear(random_weight(8, 64), None, DTYPES[0], CPU), TritonLinear)


LINEAR = {
    "native": lambda weight, bias, dtype, device: CPULinear(weight, bias, dtype),
    "reference": ReferenceLinear,
    "triton": TritonLinear,
}


@needs_compiler
@pytest.mark.parametrize("group_size", [32, -1])
def test_a_model_has_the_same_logits_whatever_computes_its_layers(
    tmp_path: Path, monkeypatch, group_size
):
    """To 1e-4 of their range, in float32. The prompt has 17 tokens: one more than few rows."""
    write_awq(tmp_path, group_size=group_size)
    logits = {}
    for name, linear in LINEAR.items():
        monkeypatch.setattr(packed, "packed_linear", linear)
        logits[name] = logits_of(awq(tmp_path))
    spread = logits["reference"].max() - logits["reference"].min()
    assert (logits["triton"] - logits["reference"]).abs().max() < 1e-4 * spread
    assert (logits["triton"] - logits["native"]).abs().max() < 1e-4 * spread
