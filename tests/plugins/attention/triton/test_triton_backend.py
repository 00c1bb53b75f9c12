"""What `triton_paged` accepts, and what it needs to be imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import get_args

import pytest
import torch

from pageloom.contract import AttentionSpec, LayerSpec, VectorLayout
from pageloom.contract.quantizer import Element, Scaling
from pageloom_attention.triton_paged import TritonPaged

LAYER = LayerSpec(4, 2, 64, 0.125)
ON_CPU = AttentionSpec(torch.device("cpu"), torch.bfloat16, (LAYER,), 16, 4096)
ON_GPU = replace(ON_CPU, device=torch.device("cuda", 0))
EIGHT = VectorLayout("int8", "token_head")


@pytest.fixture
def gpu(monkeypatch):
    """Pretend that there is one of this compute capability."""

    def have(*capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    monkeypatch.setattr(torch.version, "hip", None)
    have(9, 0)
    return have


def large_heads(spec, size):
    return replace(spec, layers=(LAYER, replace(LAYER, head_size=size)))


def test_a_cpu_must_interpret(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert (
        TritonPaged.check(ON_CPU) == "needs a GPU, or TRITON_INTERPRET=1 to be interpreted on a CPU"
    )
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert TritonPaged.check(ON_CPU) is None
    assert TritonPaged.check(large_heads(replace(ON_CPU, dtype=torch.float32), 256)) is None


def test_a_gpu_will_do(gpu):
    assert TritonPaged.check(ON_GPU) is None
    assert TritonPaged.check(large_heads(ON_GPU, 512)) is None
    assert TritonPaged.check(large_heads(replace(ON_GPU, dtype=torch.float32), 128)) is None


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (replace(ON_GPU, quantizer="mine"), "which those of mine do not; torch_paged runs every"),
        (
            replace(
                large_heads(ON_GPU, 33), quantizer="four", layout=VectorLayout("int4", "static")
            ),
            "cannot store four: int4 needs an even head size, not 33",
        ),
        (
            replace(large_heads(ON_GPU, 33), quantizer="eight", layout=EIGHT, block_size=6),
            "reads eight with head size 33 in blocks of a multiple of 4 tokens, not of 6",
        ),
        (replace(ON_GPU, dtype=torch.float64), "computes in float32, bfloat16 and float16, not"),
        (large_heads(ON_GPU, 513), "supports head sizes up to 512, not 513"),
        (
            large_heads(replace(ON_GPU, dtype=torch.float32), 256),
            "computes in float32 up to head size 128, not 256",
        ),
        (replace(ON_GPU, device=torch.device("mps")), "runs on NVIDIA and AMD GPUs, not on mps"),
    ],
)
def test_what_it_cannot_do_is_refused_with_the_reason(gpu, spec, reason):
    assert reason in TritonPaged.check(spec)


def test_every_layout_will_do(gpu):
    for element in get_args(Element):
        for scaling in get_args(Scaling):
            layout = VectorLayout(element, scaling)
            assert TritonPaged.check(replace(ON_GPU, quantizer="a format", layout=layout)) is None
    odd = large_heads(replace(ON_GPU, quantizer="eight", layout=EIGHT), 33)
    assert TritonPaged.check(odd) is None


def test_an_old_gpu_is_refused(gpu):
    gpu(7, 5)
    assert TritonPaged.check(ON_GPU) == "needs compute capability 8.0, 7.5 is too old"


def test_an_amd_gpu_has_no_compute_capability_and_computes_in_float32(gpu, monkeypatch):
    gpu(7, 5)
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert TritonPaged.check(large_heads(replace(ON_GPU, dtype=torch.float32), 256)) is None


def test_without_triton_it_says_so():
    run(
        "sys.modules['triton'] = None\n"
        "from pageloom_attention.triton_paged import TritonPaged\n"
        "assert TritonPaged.check(None) == 'needs the package triton'"
    )


def test_looking_at_it_imports_no_triton():
    run(
        "import torch\n"
        "from pageloom.plugins import Plugins\n"
        "backend = Plugins.load().get('attention_backend', 'triton_paged')\n"
        "backend.block_size(None, 100)\n"
        "assert backend.auto_rank > 0\n"
        "assert 'triton' not in sys.modules"
    )


def run(code: str) -> None:
    subprocess.run([sys.executable, "-c", f"import sys\n{code}"], check=True, timeout=1200)
