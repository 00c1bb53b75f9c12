"""Packed linear layers in Triton: interpreted on a CPU, compiled for GPUs that are not here, and on
a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_packed import CPU, DTYPES, exact, random_rows, random_weight

from pageloom.engine.memory_report import weight_bytes
from pageloom_quant import packed
from pageloom_quant.packed import packed_linear, triton, why_not_native
from pageloom_quant.packed.reference import ReferenceLinear
from pageloom_quant.packed.triton import TritonLinear
from triton_script import load_script

pytest.importorskip("triton")

HERE = Path(__file__).parent
CUDA = torch.device("cuda")


resources = load_script()
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
INTEGERS = ("rows", "outputs", "panels", "steps", "steps_per_split", "size", "splits")


def test_it_computes_what_the_weights_say_when_interpreted():
    tests = HERE / "packed_triton_interpreted.py"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", str(tests)]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


COMPILED = [  # rows, dtype, bits, group, whether offsets are stored
    (1, torch.bfloat16, 4, 128, True),
    (16, torch.float16, 8, 32, False),
    (1, torch.float32, 4, 64, True),
    (17, torch.float16, 4, 32, True),
    (4096, torch.bfloat16, 4, 128, True),
    (4096, torch.float32, 4, 64, False),
]


def compile_multiply(target, rows, dtype, bits, group, **fixed):
    from pageloom_quant.packed.triton_kernels import multiply_kernel

    gpu, family = resources.TARGETS[target]
    types = dict.fromkeys(("out", "x", "bias"), f"*{NAMES[dtype]}") | {"codes": "*i32"}
    types |= dict.fromkeys(("scales", "offsets"), "*fp16") | dict.fromkeys(INTEGERS, "i32")
    fixed |= triton.constants(bits, group, family, dtype)
    fixed |= triton.launched(triton.choose(family, rows, dtype), rows)
    compiled = resources.compile_for(gpu, multiply_kernel, types, fixed)
    return resources.resources_of(compiled, family)


@pytest.mark.parametrize("target", resources.TARGETS)
@pytest.mark.parametrize(("rows", "dtype", "bits", "group", "offsets"), COMPILED)
def test_a_kernel_fits_and_spills_no_registers(target, rows, dtype, bits, group, offsets):
    found = compile_multiply(
        target, rows, dtype, bits, group, **({} if offsets else {"offsets": None})
    )
    assert found.registers > 0
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= resources.SHARED_LIMIT[target]


def test_a_layer_of_one_step_and_one_output_compiles():
    """Triton makes constants of arguments that are 1."""
    ones = dict.fromkeys(("outputs", "panels", "steps"), 1)
    assert compile_multiply("sm_90", 1, torch.bfloat16, 4, 32, bias=None, **ones).registers > 0


@pytest.mark.parametrize("target", resources.TARGETS)
def test_partial_sums_are_added_without_spilling(target):
    from pageloom_quant.packed.triton_kernels import add_kernel

    gpu, family = resources.TARGETS[target]
    types = {"out": "*bf16", "partials": "*fp32", "bias": "*bf16"} | dict.fromkeys(INTEGERS, "i32")
    compiled = resources.compile_for(gpu, add_kernel, types, triton.ADDING)
    assert resources.resources_of(compiled, family).spilled_bytes == 0


def test_a_code_in_the_last_bits_of_a_16_bit_number_counts_as_itself():
    from pageloom_quant.packed import triton_kernels as kernels

    codes = torch.arange(16, dtype=torch.int16)
    for dtype, bits, base in (
        (torch.bfloat16, kernels.BFLOAT16_BITS, kernels.BFLOAT16_BASE),
        (torch.float16, kernels.FLOAT16_BITS, kernels.FLOAT16_BASE),
    ):
        half = bits.value & 0xFFFF
        assert bits.value == half << 16 | half
        number = (codes | half).view(dtype)
        assert torch.equal(number - (base.value + 8), (codes - 8).to(dtype))


def test_a_layer_takes_its_packed_bytes_and_no_more():
    layer = TritonLinear(random_weight(64, 128), None, torch.bfloat16, CPU)
    # 4 bits, and a scale and a minimum of 16 bits for 32 weights: 5 bits each.
    assert weight_bytes([layer]) == {"int4": 64 * 128 * 5 // 8}
    symmetric = random_weight(64, 128, bits=8, symmetric=True, dtype=torch.bfloat16)
    layer = TritonLinear(symmetric, None, torch.float32, CPU)
    assert weight_bytes([layer]) == {"int8": 64 * 128 * 17 // 16}


@pytest.mark.parametrize("family", ["ampere", "hopper", "amd"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_are_always_computed_alike(family, dtype):
    few = {triton.choose(family, rows, dtype) for rows in range(1, triton.FEW_ROWS + 1)}
    assert len(few) == 1
    assert few.pop().rows == triton.FEW_ROWS


@pytest.mark.parametrize("steps", [1, 4, 5, 32, 112, 1000])
@pytest.mark.parametrize("wanted", [0, 1, 3, 8, 1000])
def test_splits_share_all_steps_and_none_is_small(steps, wanted):
    each = triton.split(steps, 128, wanted)
    splits = -(-steps // each)
    assert (splits - 1) * each < steps <= splits * each
    assert splits <= max(wanted, 1)
    assert each >= min(steps, 4)


@pytest.fixture
def gpu(monkeypatch):
    """Has there be a GPU of a capability, as far as the choice of a module goes."""

    def make(capability=(9, 0)):
        triton._capability.cache_clear()
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    yield make
    triton._capability.cache_clear()


def test_gpus_get_it_unless_something_is_missing(gpu, monkeypatch):
    gpu()
    assert why_not_native(torch.bfloat16, CUDA) is None
    assert "not torch.float64" in str(why_not_native(torch.float64, CUDA))
    assert "on xpu" in str(why_not_native(torch.bfloat16, torch.device("xpu")))
    gpu((7, 5))
    assert why_not_native(torch.float16, CUDA) == (
        "the Triton kernels need compute capability 8.0, and cuda has 7.5"
    )
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert why_not_native(torch.float16, CUDA) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "triton, which is needed on GPUs, is not installed" in str(
        why_not_native(torch.bfloat16, CUDA)
    )


def test_groups_that_steps_do_not_divide_are_left_to_the_reference(gpu, monkeypatch):
    gpu()
    made = {"TritonLinear": [], "ReferenceLinear": []}
    monkeypatch.setattr(triton, "TritonLinear", lambda *given: made["TritonLinear"].append(given))
    monkeypatch.setattr(
        packed, "ReferenceLinear", lambda *given: made["ReferenceLinear"].append(given)
    )
    for group in (16, 32, 48, 96):
        packed_linear(random_weight(8, 96, group=group), None, torch.float16, CUDA)
    groups = {name: [given[0].group_size for given in calls] for name, calls in made.items()}
    assert groups == {"TritonLinear": [32, 96], "ReferenceLinear": [16, 48]}


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 96, 128, 1536])
def test_on_a_gpu_it_computes_what_the_weights_say(dtype, bits, group):
    step = torch.finfo(dtype).eps
    for symmetric in (False, True):
        weight = random_weight(1000, 1536, bits, group, symmetric)
        bias = torch.linspace(-1, 1, 1000).to(dtype)
        layer = packed_linear(weight, bias, dtype, CUDA)
        assert isinstance(layer, TritonLinear)
        for rows in (1, 3, 16, 17, 40, 64, 300):
            x = random_rows(rows, 1536, dtype)
            found = layer(x.to(CUDA)).cpu().double()
            expected = exact(x, weight, bias)
            terms = x.double().abs() @ weight.dequantize(torch.float32).double().abs().T
            # Where rows are many, weights are rounded: by less than this all together.
            rounded = step if rows > triton.FEW_ROWS else 0
            slack = terms * (rounded + 2e-6) + 4e-4
            assert ((found - expected).abs() <= expected.abs() * step + slack).all()


@pytest.mark.gpu
@needs_gpu
def test_on_a_gpu_it_agrees_with_the_reference():
    weight, x = random_weight(200, 512, group=64), random_rows(20, 512, torch.float32).to(CUDA)
    found = TritonLinear(weight, None, torch.float32, CUDA)(x)
    expected = ReferenceLinear(weight, None, torch.float32, CUDA)(x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_graph_of_a_layer_repeats_it_to_the_bit(rows):
    weight = random_weight(1000, 4096, group=128)
    layer = TritonLinear(weight, torch.ones(1000), torch.bfloat16, CUDA)
    x = torch.randn(rows, 4096, dtype=torch.bfloat16, device=CUDA)
    layer(x)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = layer(x)
    for _ in range(3):
        x.normal_()
        graph.replay()
        assert torch.equal(out, layer(x))
