"""Every kind of kernel instance compiles to machine code, without a GPU and without a driver."""

from __future__ import annotations

import re

import pytest
import torch

from pageloom.contract import VectorLayout
from pageloom_attention.cuda_paged import nvrtc
from pageloom_attention.cuda_paged.instance import ELEMENTS, SCALINGS, Instance

pytestmark = pytest.mark.skipif(
    (reason := nvrtc.missing()) is not None, reason=f"needs {reason}: pip install 'pageloom[cuda]'"
)

# Each head size with each dtype; groups and block sizes, of all kinds, go along.
SHAPES = {
    torch.bfloat16: [(64, 3, 16), (80, 1, 32), (96, 8, 48), (128, 4, 16), (256, 7, 3)],
    torch.float16: [(64, 16, 256), (80, 71, 16), (96, 2, 1), (128, 5, 64), (256, 2, 16)],
    torch.float32: [(64, 3, 16), (80, 1, 3), (96, 12, 48), (128, 4, 256), (256, 8, 16)],
}
INSTANCES = [Instance(dtype, *shape) for dtype, shapes in SHAPES.items() for shape in shapes]
ARCHITECTURES = ("sm_80", "sm_90")
CASES = [(instance, arch) for instance in INSTANCES for arch in ARCHITECTURES]
# Each KV format, with dtypes, shapes, architectures and the kernels for float32 in turn.
LAYOUTS = [VectorLayout(element, scaling) for element in ELEMENTS for scaling in SCALINGS]
CASES += [
    (Instance(dtype, *SHAPES[dtype][i % 5], layout), ARCHITECTURES[(i + i // 2) % 2])
    for i, layout in enumerate(LAYOUTS)
    for dtype in [list(SHAPES)[i % 2], *([torch.float32] if i % 4 == 1 else [])]
]
REGISTERS = 65536  # of a multiprocessor
MOST_SHARED = 48 * 1024  # bytes of a thread block


@pytest.mark.parametrize(
    ("instance", "arch"),
    CASES,
    ids=lambda case: case if case in ARCHITECTURES else case.kernels["decode"],
)
def test_compiles_without_spills(instance, arch, record_property):
    compiled = nvrtc.compile_kernels(instance.kernels.values(), arch)
    assert compiled.cubin.startswith(b"\x7fELF")
    for name, symbol in compiled.symbols.items():
        assert symbol in compiled.cubin, name
    assert compiled.spilled_bytes == 0, compiled.log
    registers = [int(n) for n in re.findall(r"Used (\d+) registers", compiled.log)]
    shared = [int(n) for n in re.findall(r"(\d+) bytes smem", compiled.log)]
    assert len(registers) == len(compiled.symbols)
    # At least two thread blocks of 128 threads fit on a multiprocessor.
    assert max(registers) * 128 * 2 <= REGISTERS
    assert max(shared, default=0) <= MOST_SHARED
    record_property("registers", max(registers))
    record_property("shared_bytes", max(shared, default=0))


def test_what_the_compiler_says_is_reported():
    with pytest.raises(nvrtc.CompileError, match=r"NVRTC failed for sm_80 .*\n.*nonsense"):
        nvrtc.compile_kernels(["nonsense<3>"], "sm_80")
    with pytest.raises(nvrtc.CompileError, match="sm_12345"):
        nvrtc.compile_kernels(["copy<uint4>"], "sm_12345")
