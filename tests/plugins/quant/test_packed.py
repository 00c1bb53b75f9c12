"""Packed weights, and every module that multiplies by one."""

from __future__ import annotations

import logging
import platform
from dataclasses import replace

import pytest
import torch

from pageloom.contract import native
from pageloom.engine.memory_report import weight_bytes
from pageloom_quant import packed
from pageloom_quant.packed import PackedWeight, cpu, packed_linear, reference
from pageloom_quant.packed.cpu import CPULinear
from pageloom_quant.packed.reference import ReferenceLinear

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
needs_compiler = pytest.mark.skipif(
    native.find_compiler() is None, reason="there is no C++ compiler"
)


def random_weight(
    outputs: int,
    inputs: int,
    bits: int = 4,
    group: int = 32,
    symmetric: bool = False,
    dtype: torch.dtype = torch.float16,
) -> PackedWeight:
    """Weights around 0 of about ``inputs ** -0.5``."""
    generator = torch.Generator().manual_seed(outputs + inputs + bits + group)
    groups, middle = inputs // group, 1 << (bits - 1)
    codes = torch.randint(
        256, (outputs, inputs * bits // 8), generator=generator, dtype=torch.uint8
    )
    scales = (torch.rand(outputs, groups, generator=generator) + 0.5) / middle / inputs**0.5
    scales = scales.to(dtype)
    shift = 0 if symmetric else torch.rand(outputs, groups, generator=generator) - 0.5
    minimums = -scales.float() * middle * (1 + shift)
    return PackedWeight(codes, scales, minimums.to(dtype), group, bits)


def random_rows(rows: int, inputs: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, inputs, generator=torch.Generator().manual_seed(rows)).to(dtype)


def exact(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    product = x.double() @ weight.dequantize(torch.float32).double().T
    return product if bias is None else product + bias.double()


def assert_rounded(found: torch.Tensor, expected: torch.Tensor, symmetric: bool) -> None:
    """``found`` is ``expected`` after sums in float32 and one rounding to its dtype, and maybe one
    of the zero points."""
    assert found.dtype in DTYPES
    step = torch.finfo(found.dtype).eps / 2
    error = (found.double() - expected).abs()
    slack = 4e-6 if symmetric or found.dtype == torch.float32 else 4e-4
    assert (error <= expected.abs() * step * 1.01 + slack).all(), error.max()


def test_a_weight_is_its_codes_times_scales_plus_minimums():
    codes = torch.tensor([[0, 15, 7, 8], [1, 2, 3, 4]], dtype=torch.uint8)
    scales, minimums = torch.tensor([[1.0, 10.0], [2.0, 0.5]]), torch.tensor([[0.0, -5], [3, 1]])
    weight = PackedWeight.from_codes(codes, scales, minimums)
    assert (weight.out_features, weight.in_features, weight.group_size) == (2, 4, 2)
    assert weight.codes.tolist() == [[0xF0, 0x87], [0x21, 0x43]]
    expected = [[0, 15, 65, 75], [5, 7, 2.5, 3]]
    assert weight.dequantize(torch.float32).tolist() == expected
    bytes_ = PackedWeight(codes, scales, minimums, group_size=2, bits=8)
    assert bytes_.dequantize(torch.bfloat16).tolist() == expected


def test_merged_weights_keep_their_order():
    parts = [random_weight(outputs, 64) for outputs in (3, 1, 5)]
    merged = PackedWeight.cat(parts).dequantize(torch.float32)
    assert torch.equal(merged, torch.cat([part.dequantize(torch.float32) for part in parts]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 3}, "codes of 3 bits cannot be packed, only of 4 or 8"),
        ({"codes": torch.zeros(4, 32)}, r"must be uint8 .* not float32 \[4, 32\]"),
        ({"codes": torch.zeros(4, dtype=torch.uint8)}, r"two dimensions, not uint8 \[4\]"),
        ({"group_size": 48}, "64 inputs cannot be cut into groups of 48"),
        ({"group_size": 0}, "64 inputs cannot be cut into groups of 0"),
        ({"scales": torch.zeros(4, 1)}, r"scales must be .* \[4, 2\], not float32 \[4, 1\]"),
        ({"minimums": torch.zeros(4, 2).int()}, r"minimums must be .* not int32 \[4, 2\]"),
    ],
)
def test_parts_that_do_not_fit_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(random_weight(4, 64), **change)


def test_codes_that_do_not_fit_are_refused():
    ones = torch.ones(1, 1)
    with pytest.raises(ValueError, match="code 16 does not fit into 4 bits"):
        PackedWeight.from_codes(torch.full((1, 2), 16, dtype=torch.uint8), ones, ones)
    with pytest.raises(ValueError, match="3 inputs cannot be packed two by two"):
        PackedWeight.from_codes(torch.zeros(1, 3, dtype=torch.uint8), ones, ones)
    with pytest.raises(ValueError, match=r"cannot be one layer: \[\(64, 4, 32\), \(64, 8, 32\)\]"):
        PackedWeight.cat([random_weight(2, 64), random_weight(2, 64, bits=8)])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_the_reference_multiplies_block_by_block(monkeypatch, dtype, bits):
    monkeypatch.setattr(reference, "BLOCK_ELEMENTS", 3 * 64)
    weight, x = random_weight(10, 64, bits), random_rows(5, 64, dtype)
    bias = torch.randn(10).to(dtype)
    found = ReferenceLinear(weight, bias, dtype, CPU)(x)
    expected = torch.nn.functional.linear(x, weight.dequantize(dtype), bias)
    torch.testing.assert_close(found, expected)


def check_cpu_linear(dtype: torch.dtype, bits: int) -> None:
    """`CPULinear` against exact products: groups, zero points, ragged sizes, few and many rows."""
    for group, symmetric, scales in [
        (32, False, torch.float16),
        (64, True, torch.float32),
        (192, False, torch.bfloat16),
        (96, True, torch.float16),
    ]:
        for outputs in (1, 70):
            weight = random_weight(outputs, 192, bits, group, symmetric, scales)
            bias = torch.linspace(-1, 1, outputs).to(dtype) if symmetric else None
            layer = CPULinear(weight, bias, dtype)
            for rows in (1, 2, 7, 33):
                x = random_rows(rows, 192, dtype)
                assert_rounded(layer(x), exact(x, weight, bias), symmetric)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_native_products_are_rounded_once(dtype, bits):
    check_cpu_linear(dtype, bits)


def check_expanding(monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    monkeypatch.setattr(cpu, "has_amx", lambda: True)
    monkeypatch.setattr(cpu, "EXPAND_ROWS", 5)
    monkeypatch.setattr(cpu, "BLOCK_ELEMENTS", 64 * 192)  # two panels
    for group, symmetric in ((32, False), (64, True)):
        weight = random_weight(70, 192, bits, group, symmetric)
        bias = torch.linspace(-1, 1, 70).bfloat16() if symmetric else None
        layer = CPULinear(weight, bias, torch.bfloat16)
        x = random_rows(9, 192, torch.bfloat16)
        rounded = weight.dequantize(torch.bfloat16)
        product = torch.nn.functional.linear(x, rounded)
        expected = product if bias is None else product + bias
        torch.testing.assert_close(layer(x), expected)
        assert_rounded(layer(x[:4]), exact(x[:4], weight, bias), symmetric)


@needs_compiler
@pytest.mark.parametrize("bits", [4, 8])
def test_with_amx_many_rows_are_multiplied_by_expanded_blocks(monkeypatch, bits):
    check_expanding(monkeypatch, bits)


LESSER_CPUS = {
    "no AVX512-BF16": "-mno-avx512bf16",
    "AVX2": "-mno-avx512f",
    "SSE2": "-mno-avx",
}


@needs_compiler
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the flags are of x86")
@pytest.mark.parametrize("target", LESSER_CPUS)
def test_native_products_are_right_on_lesser_cpus(target, monkeypatch):
    library = cpu.load_library((*cpu.FLAGS, "-O1", LESSER_CPUS[target]))
    monkeypatch.setattr(cpu, "load_library", lambda: library)
    for dtype in DTYPES:
        for bits in (4, 8):
            check_cpu_linear(dtype, bits)
    for bits in (4, 8):
        check_expanding(monkeypatch, bits)


@needs_compiler
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_neither_threads_nor_neighbours_change_a_bit(dtype, bits):
    weight = random_weight(100, 2048, bits)
    layer, x = CPULinear(weight, None, dtype), random_rows(70, 2048, dtype)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = layer(x)
        torch.set_num_threads(3)
        assert torch.equal(layer(x), expected)
        for rows in (1, 3, 8, 31, 40):
            assert torch.equal(layer(x[5 : 5 + rows]), expected[5 : 5 + rows])
    finally:
        torch.set_num_threads(before)


@needs_compiler
def test_rows_may_be_strided_none_or_in_more_dimensions():
    weight = random_weight(40, 64)
    layer, x = CPULinear(weight, None, torch.float32), random_rows(6, 128)
    assert torch.equal(layer(x[:, :64]), layer(x[:, :64].contiguous()))
    assert layer(x[:0, :64]).shape == (0, 40)
    assert torch.equal(layer(x[:, :64].view(2, 3, 64)).view(6, 40), layer(x[:, :64]))


@needs_compiler
def test_rows_of_another_size_or_dtype_are_refused():
    layer = CPULinear(random_weight(40, 64), None, torch.bfloat16)
    for x in (torch.zeros(2, 64), torch.zeros(2, 32, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match=r"64 inputs in torch\.bfloat16 cannot multiply"):
            layer(x)


@needs_compiler
@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_stays_in_its_row(poison):
    weight, x = random_weight(40, 64), random_rows(3, 64, torch.bfloat16)
    x[1, 7] = poison
    found = CPULinear(weight, None, torch.bfloat16)(x)
    assert not found[1].isfinite().any()
    assert found[[0, 2]].isfinite().all()


@needs_compiler
def test_a_layer_takes_its_packed_bytes_and_no_more():
    layer = packed_linear(random_weight(64, 128), None, torch.bfloat16, CPU)
    # 4 bits, and a scale and a minimum of 16 bits for 32 weights: 5 bits each.
    assert weight_bytes([layer]) == {"int4": 64 * 128 * 5 // 8}
    symmetric = random_weight(64, 128, bits=8, symmetric=True)
    assert weight_bytes([packed_linear(symmetric, None, torch.bfloat16, CPU)]) == {
        "int8": 64 * 128 * 17 // 16
    }


@needs_compiler
def test_the_native_module_takes_what_it_can_and_the_reference_the_rest(monkeypatch, caplog):
    monkeypatch.setattr(packed, "_warned", set())

    def chosen(weight, dtype=torch.bfloat16, device=CPU):
        return type(packed_linear(weight, None, dtype, device))

    assert chosen(random_weight(8, 64)) is CPULinear
    assert not caplog.messages
    assert chosen(random_weight(8, 64, group=16)) is ReferenceLinear
    (line,) = caplog.messages
    assert line.endswith("which is slow: the native code cannot read groups of 16")
    assert chosen(random_weight(8, 64), device=torch.device("meta")) is ReferenceLinear


def test_without_a_compiler_one_line_says_so(monkeypatch, caplog):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(packed, "_warned", set())
    cpu.forget_library()
    try:
        with caplog.at_level(logging.WARNING):
            layers = [
                packed_linear(random_weight(8, 64), None, torch.float32, CPU) for _ in range(3)
            ]
    finally:
        cpu.forget_library()
    assert all(isinstance(layer, ReferenceLinear) for layer in layers)
    (line,) = caplog.messages
    assert line == (
        "packed linear layers are expanded whenever they run, which is slow: there is no C++ "
        "compiler: install one (c++), or set CXX"
    )
