"""The fused kernels: interpreted on a CPU, compiled for GPUs that are not here, and on a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from triton_script import load_script

pytest.importorskip("triton")

from pageloom.ops import choice, fused

HERE = Path(__file__).parent
KERNELS = {
    "norm of 576": ("bf16", fused.add_rms_norm_kernel, fused.norm_constants(576)),
    "norm of the longest rows": (
        "fp32",
        fused.add_rms_norm_kernel,
        fused.norm_constants(fused.MAX_ROW),
    ),
    "rotation with norm": ("bf16", fused.rotate_kernel, fused.rotate_constants(40, 128)),
    "rotation": ("bf16", fused.rotate_kernel, fused.rotate_constants(12, 80) | {"weight": None}),
    "activation": ("bf16", fused.silu_and_mul_kernel, fused.silu_constants(14336)),
}


resources = load_script()


@pytest.mark.parametrize("target", resources.TARGETS)
@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_compiles_and_spills_no_registers(name, target):
    gpu, family = resources.TARGETS[target]
    dtype, kernel, constants = KERNELS[name]
    tensors = ("out", "x", "residual", "weight", "cos", "sin", "gate_up")
    types = dict.fromkeys(tensors, f"*{dtype}") | {"x_row": "i32", "eps": "fp32"}
    compiled = resources.compile_for(gpu, kernel, types, constants)
    found = resources.resources_of(compiled, family)
    assert found.registers > 0
    assert found.spilled_bytes == 0


def test_the_kernels_compute_what_torch_does_when_interpreted():
    tests = HERE / "fused_interpreted.py"
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", str(tests)]
    variables = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


@pytest.fixture
def gpu(monkeypatch):
    """A tensor that says it lies on a GPU of this capability."""

    def make(dtype=torch.bfloat16, capability=(9, 0)):
        choice._has_kernels.cache_clear()
        monkeypatch.setattr(torch.version, "hip", None)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
        return SimpleNamespace(is_cuda=True, dtype=dtype, get_device=lambda: 0)

    yield make
    choice._has_kernels.cache_clear()


def test_they_are_for_gpus_that_have_bfloat16(gpu):
    assert choice.runs_fused(gpu())
    assert not choice.runs_fused(gpu(dtype=torch.float64))
    assert not choice.runs_fused(gpu(capability=(7, 5)))
    assert not choice.runs_fused(torch.zeros(1))


def test_without_triton_torch_does_it(gpu, monkeypatch):
    tensor = gpu()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not choice.runs_fused(tensor)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu_they_compute_what_torch_does_on_the_cpu(dtype):
    from pageloom.ops.activation import silu_and_mul
    from pageloom.ops.norm import add_rms_norm
    from pageloom.ops.rope import RotaryTable, norm_rotate_, rotate_

    torch.manual_seed(0)
    x, residual, weight = (torch.randn(n, 4096).to(dtype) for n in (5, 5, 1))
    heads, head_weight = torch.randn(5, 6, 128).to(dtype), torch.rand(6, 128).to(dtype)
    frequencies, positions = 1e4 ** -torch.rand(64), torch.tensor([0, 99, 17, 3, 3])

    def compute(device):
        """Copies: most of the operations write to what they read."""
        table = RotaryTable(frequencies, 1.0, 100, dtype, torch.device(device))
        cos, sin = table.at(positions.to(device))
        total = residual.to(device, copy=True)
        yield add_rms_norm(x.to(device), total, weight[0].to(device), 1e-5)
        yield total
        yield silu_and_mul(x.to(device))
        yield rotate_(heads.to(device, copy=True), cos, sin)
        copy = heads.to(device, copy=True)
        yield norm_rotate_(copy, head_weight.to(device), 1e-5, cos, sin)

    tolerance = {"atol": 4e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    for found, expected in zip(compute("cuda"), compute("cpu"), strict=True):
        torch.testing.assert_close(found.cpu(), expected, **tolerance)
