"""What each kernel of `triton_paged` takes of a GPU, found by compiling it for GPUs that are not
here.

    python benchmarks/triton_resources.py [OUT.json]

Triton brings the assemblers and needs no driver, so this runs anywhere on Linux. Per thread and
program: registers, bytes of local memory (scratch) and bytes of shared memory. The kernels use no
arrays per thread, so any local memory is spilled registers.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pageloom.contract import LayerSpec, VectorLayout
from pageloom.contract.quantizer import Element, Scaling
from pageloom_attention.triton_paged import kernels, launch
from pageloom_attention.triton_paged.tiles import Family, choose

RESULTS = Path(__file__).parent / "results" / "triton_resources.json"
TARGETS: dict[str, tuple[GPUTarget, Family]] = {
    "sm_80": (GPUTarget("cuda", 80, 32), "ampere"),
    "sm_90": (GPUTarget("cuda", 90, 32), "hopper"),
    "sm_100": (GPUTarget("cuda", 100, 32), "hopper"),
    "gfx942": (GPUTarget("hip", "gfx942", 64), "amd"),
}
SHARED_LIMIT = {"sm_80": 101376, "sm_90": 232448, "sm_100": 232448, "gfx942": 65536}
"""Bytes per program. What is compiled for sm_80 also runs on sm_86, which has the least."""


@dataclass(frozen=True)
class Variant:
    kernel: str  # attend, store or merge
    dtype: torch.dtype
    layer: LayerSpec
    block_size: int = 16
    decode: bool = False
    layout: VectorLayout | None = None
    rotary: bool = False  # whether storing rotates q and k

    def __str__(self) -> str:
        layer = self.layer
        features = [name for name in ("window", "softcap", "sinks") if getattr(layer, name)]
        parts = [self.kernel] + ["decode" if self.decode else "any step"] * (self.kernel != "store")
        parts += [str(self.dtype).removeprefix("torch."), f"head size {layer.head_size}"]
        parts += [f"{layer.num_heads} heads over {layer.num_kv_heads}"]
        parts += [f"block size {self.block_size}", *features] + ["rotated"] * self.rotary
        return ", ".join(
            [*parts, f"{self.layout.element} {self.layout.scaling}"] if self.layout else parts
        )


@dataclass(frozen=True)
class Resources:
    registers: int
    spilled_bytes: int
    shared_bytes: int


def _layer(heads: int, kv_heads: int, head_size: int, **features: Any) -> LayerSpec:
    return LayerSpec(heads, kv_heads, head_size, head_size**-0.5, **features)


_BF16, _FP16, _FP32 = torch.bfloat16, torch.float16, torch.float32
_LLAMA, _SMALL = _layer(32, 8, 128), _layer(9, 3, 64)
_GEMMA, _ALL = _layer(8, 4, 256, window=1024, softcap=50.0), {"softcap": 30.0, "sinks": True}
_ELEMENTS: tuple[Element, ...] = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
_SCALINGS: tuple[Scaling, ...] = ("static", "token_head")
_LAYOUTS = [VectorLayout(element, scaling) for element in _ELEMENTS for scaling in _SCALINGS]
VARIANTS = [
    *(Variant("attend", _BF16, _LLAMA, decode=decode) for decode in (True, False)),
    *(Variant("attend", _BF16, _SMALL, decode=decode) for decode in (True, False)),
    *(Variant("attend", _BF16, _GEMMA, decode=decode) for decode in (True, False)),
    Variant("attend", _BF16, _layer(16, 8, 256, softcap=50.0)),
    Variant("attend", _FP16, _layer(64, 8, 64, window=128, sinks=True), decode=True),
    Variant("attend", _FP16, _layer(32, 8, 128, **_ALL), block_size=1),
    Variant("attend", _BF16, _layer(71, 1, 64), decode=True),
    Variant("attend", _BF16, _layer(32, 32, 80), block_size=96),
    Variant("attend", _BF16, _layer(16, 2, 512), block_size=64),
    Variant("attend", _FP32, _LLAMA),
    Variant("store", _BF16, _LLAMA),
    Variant("merge", _BF16, _LLAMA, decode=True),
    *(Variant("attend", _BF16, _LLAMA, decode=True, layout=layout) for layout in _LAYOUTS),
    *(Variant("attend", _BF16, _LLAMA, layout=_LAYOUTS[i]) for i in (0, 5, 7)),
    Variant("attend", _BF16, _GEMMA, decode=True, layout=_LAYOUTS[7]),
    Variant("attend", _FP32, _LLAMA, layout=_LAYOUTS[7]),
    *(Variant("store", _BF16, _LLAMA, layout=layout) for layout in _LAYOUTS),
    Variant("attend", _FP16, _SMALL, decode=True, layout=_LAYOUTS[3]),
    Variant("store", _BF16, _LLAMA, rotary=True),
    Variant("store", _FP32, _GEMMA, rotary=True),
    Variant("store", _BF16, _LLAMA, layout=_LAYOUTS[7], rotary=True),
]


def measure(variant: Variant, target: str) -> Resources:
    gpu, family = TARGETS[target]
    return resources_of(_compile(variant, gpu, family), family)


def resources_of(compiled: Any, family: Family) -> Resources:
    """Of a kernel as `compile_for` returned it."""
    shared = compiled.metadata.shared
    if family == "amd":
        notes = compiled.asm["amdgcn"].split("amdhsa.kernels")[1]
        found = dict(re.findall(r"\.(\w+):\s*(\d+)", notes))
        return Resources(int(found["vgpr_count"]), int(found["private_segment_fixed_size"]), shared)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", told))
    return Resources(int(found["REG"]), int(found["STACK"]) + int(found["LOCAL"]), shared)


def _compile(variant: Variant, gpu: GPUTarget, family: Family) -> Any:
    layer, size, tl = variant.layer, variant.block_size, launch.DTYPES[variant.dtype]
    pointer = f"*{tl}"
    group = layer.num_heads // layer.num_kv_heads
    coded, itemsize = variant.layout is not None, variant.dtype.itemsize
    tiles = choose(family, layer.head_size, itemsize, group, variant.decode, coded)
    types = dict.fromkeys(("out", "q", "k", "v", "cos", "sin"), pointer)
    types |= dict.fromkeys(("keys", "values"), "*u8" if variant.layout else pointer)
    types |= dict.fromkeys(("partials", "stats"), "*fp32")
    types |= dict.fromkeys(("items", "merges", "block_tables"), "*i32") | {"slots": "*i64"}
    types |= dict.fromkeys(("q_row", "k_row", "v_row", "out_row", "table_row", "num_tokens"), "i32")
    types |= {"sinks": "*fp32"}
    types |= dict.fromkeys(("scale", "cap", "v_scale", "k_inverse", "v_inverse"), "fp32")
    static = variant.layout is not None and variant.layout.scaling == "static"
    if variant.kernel == "store":
        kernel = kernels.store_kernel
        constants = launch.store(layer, size, variant.dtype, family, variant.layout)
        without = () if static else ("k_inverse", "v_inverse")
        without += () if variant.rotary else ("q", "q_row", "cos", "sin")
    elif variant.kernel == "merge":
        kernel, constants, without = kernels.merge_kernel, launch.merge(layer, tiles), ()
    else:
        kernel = kernels.attend_kernel
        constants = launch.attend(layer, size, variant.dtype, family, variant.layout, tiles)
        given = {"sinks": layer.sinks, "cap": layer.softcap, "v_scale": variant.layout}
        without = tuple(name for name, value in given.items() if not value)
    # A new dictionary: those of `launch` are kept, and shared by variants.
    return compile_for(gpu, kernel, types, constants | dict.fromkeys(without))


def compile_for(
    gpu: GPUTarget, kernel: Any, types: dict[str, str], constants: dict[str, Any]
) -> Any:
    """``kernel``, whose arguments have ``types`` by name, but for what ``constants`` fixes; the
    rest of ``constants`` are options."""
    names = [parameter.name for parameter in kernel.params]
    fixed = {name: value for name, value in constants.items() if name in names}
    signature = {name: "constexpr" if name in fixed else types[name] for name in names}
    # As the launcher finds them at run time: pointers and strides are multiples of 16.
    aligned = {
        (parameter.num,): [["tt.divisibility", 16]]
        for parameter in kernel.params
        if signature[parameter.name] not in ("constexpr", "fp32")
        and not parameter.do_not_specialize
    }
    options = {name: value for name, value in constants.items() if name not in names}
    source = ASTSource(kernel, signature, fixed, aligned)
    return triton.compile(source, target=gpu, options=options)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path, default=RESULTS)
    out = parser.parse_args().out
    table = {}
    for variant in VARIANTS:
        table[str(variant)] = {target: asdict(measure(variant, target)) for target in TARGETS}
        print(variant, *(f"{t}: {tuple(r.values())}" for t, r in table[str(variant)].items()))
    out.write_text(json.dumps({"triton": triton.__version__, "kernels": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
