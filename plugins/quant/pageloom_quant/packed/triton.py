"""The packed linear layer on NVIDIA and AMD GPUs, in Triton."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

from pageloom_quant.packed.weight import PackedWeight

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability: arithmetic on bfloat16
PANEL = 64  # outputs
LEAST_STEP = 32  # inputs
FEW_ROWS = 16
"""Up to so many rows, which one tile holds, codes are multiplied before they are scaled."""
LEAST_INPUTS = 512  # of a split; with fewer, partial sums are about as many bytes as weights
FUSION = {"enable_fp_fusion": True}  # Triton warns that its default will change
ADDING: dict[str, Any] = {"TILE": 1024, "num_warps": 4, **FUSION}  # of `add_kernel`

Family = Literal["ampere", "hopper", "amd", "interpreter"]


@dataclass(frozen=True, slots=True)
class Chip:
    family: Family
    """``hopper`` stands for all that have its shared memory, data-center Blackwell too, ``ampere``
    for other NVIDIA GPUs from sm_80 on, and ``interpreter`` for a CPU with Triton's interpreter."""
    processors: int  # streaming multiprocessors; compute units on AMD


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int  # of a program, a power of 2 and at least 16, as is the next
    outputs: int
    num_warps: int
    num_stages: int
    per_processor: int  # programs


INTERPRETER = Chip("interpreter", processors=1)


class TritonLinear(nn.Module):
    """``x W^T + b`` from packed codes, products summed in float32, by matrix units.

    With up to `FEW_ROWS` rows, only the result is rounded, and a row's result does not depend on
    the other rows. With more, weights are rounded to the dtype first, as expanded ones would be.
    Inputs are split over programs where outputs are too few to fill the GPU; partial sums are then
    added in a fixed order, so results repeat to the bit. Nothing waits for the GPU, and the same
    number of rows launches the same kernels, so CUDA graphs can hold it.

    On a CPU it needs TRITON_INTERPRET=1, and is only meant to be tested.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        from pageloom_quant.packed import triton_kernels  # triton takes a second to import

        self._kernels = triton_kernels
        self.weight_format = weight.format
        self._dtype = dtype
        self._inputs, self._outputs = weight.in_features, weight.out_features
        self._step = step_of(weight.group_size, dtype)
        self._codes = arrange_codes(weight, self._step).to(device)
        scales, offsets = weight.centred(dtype, (torch.float16, torch.bfloat16))
        self._scales = _columns(scales).to(device)
        self._offsets = None if offsets is None else _columns(offsets).to(device)
        self._bias = None if bias is None else bias.to(device, dtype).contiguous()
        self._chip = find_chip(device)
        self._constants = constants(weight.bits, weight.group_size, self._chip.family, dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != self._dtype or x.shape[-1] != self._inputs:
            raise ValueError(
                f"a layer of {self._inputs} inputs in {self._dtype} cannot multiply "
                f"{x.dtype} {list(x.shape)}"
            )
        out = x.new_empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self._inputs
        if rows:
            with torch.cuda.device_of(x):  # Triton launches on the current device
                self._multiply(out, x.contiguous(), rows)
        return out

    def _multiply(self, out: torch.Tensor, x: torch.Tensor, rows: int) -> None:
        tiles = choose(self._chip.family, rows, self._dtype)
        grid = -(-rows // tiles.rows) * -(-self._outputs // tiles.outputs)
        programs = self._chip.processors * tiles.per_processor
        steps = self._inputs // self._step
        per_split = split(steps, self._step, programs // grid)
        splits = -(-steps // per_split)
        whole = splits == 1
        sums = out if whole else out.new_empty(splits, rows, self._outputs, dtype=torch.float32)
        self._kernels.multiply_kernel[grid, splits](
            sums,
            x,
            self._codes,
            self._scales,
            self._offsets,
            self._bias if whole else None,
            rows,
            self._outputs,
            len(self._codes),
            steps,
            per_split,
            **self._constants,
            **launched(tiles, rows),
        )
        if not whole:
            self._kernels.add_kernel[-(-out.numel() // ADDING["TILE"]),](
                out, sums, self._bias, out.numel(), self._outputs, splits, **ADDING
            )


def fits(weight: PackedWeight) -> bool:
    """Whether `TritonLinear` can hold ``weight``."""
    return weight.group_size % LEAST_STEP == 0


def why_not(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why there is no `TritonLinear` of ``dtype`` on the GPU ``device``; None if there is."""
    if dtype not in DTYPES:
        return f"the Triton kernels compute in float32, bfloat16 and float16, not {dtype}"
    if importlib.util.find_spec("triton") is None:
        return "the package triton, which is needed on GPUs, is not installed"
    if torch.version.hip is None and (capability := _capability(device)) < OLDEST:
        return (
            f"the Triton kernels need compute capability {OLDEST[0]}.{OLDEST[1]}, and {device} has "
            f"{capability[0]}.{capability[1]}"
        )
    return None


def find_chip(device: torch.device) -> Chip:
    if device.type == "cpu":
        return INTERPRETER
    processors = torch.cuda.get_device_properties(device).multi_processor_count
    if torch.version.hip is not None:
        return Chip("amd", processors)
    return Chip("hopper" if _capability(device)[0] in (9, 10) else "ampere", processors)


@cache
def choose(family: Family, rows: int, dtype: torch.dtype) -> Tiles:
    """The largest tiles tried that need no more registers and shared memory than there are."""
    stages = 2 if family == "amd" else 3
    if rows <= FEW_ROWS:
        return Tiles(16, 64, 4, num_stages=stages + (family != "amd"), per_processor=4)
    if rows <= 32:
        return Tiles(32, 64, 4, stages, per_processor=2)
    if dtype == torch.float32:
        return Tiles(64, 64, 8, stages, per_processor=1)
    if rows <= 64 or family == "ampere":
        return Tiles(64, 128, 8, stages, per_processor=1)
    return Tiles(128, 128, 8, stages, per_processor=1)


def split(steps: int, step: int, wanted: int) -> int:
    """How many steps each program takes where ``wanted`` programs would best share them."""
    splits = max(1, min(wanted, steps * step // LEAST_INPUTS))
    return -(-steps // splits)


def step_of(group_size: int, dtype: torch.dtype) -> int:
    """Inputs that a program takes at a time: a power of 2 that divides the group."""
    most = 64 if dtype == torch.float32 else 128
    return next(step for step in (128, 64, LEAST_STEP) if step <= most and group_size % step == 0)


def constants(bits: int, group_size: int, family: Family, dtype: torch.dtype) -> dict[str, Any]:
    """Those of `multiply_kernel` that are the layer's."""
    import triton.language as tl

    step = step_of(group_size, dtype)
    names = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
    if family == "interpreter" and dtype == torch.bfloat16:
        dtype = torch.float32
    # NVIDIA's matrix units have no float32: it goes through them in three parts.
    in_parts = dtype == torch.float32 and family in ("ampere", "hopper")
    return {
        "BITS": bits,
        "STEP": step,
        "GROUP_STEPS": group_size // step,
        "PANEL": PANEL,
        "DTYPE": names[dtype],
        "PRECISION": "tf32x3" if in_parts else "ieee",
    }


@cache
def launched(tiles: Tiles, rows: int) -> dict[str, Any]:
    """The constants and options of `multiply_kernel` that are the tiles'."""
    return {
        "ROWS": tiles.rows,
        "TILE": tiles.outputs,
        "SCALE_PRODUCTS": rows <= FEW_ROWS,
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **FUSION,
    }


def arrange_codes(weight: PackedWeight, step: int) -> torch.Tensor:
    """Int32 ``[panels, steps, PANEL, words]``, as `triton_kernels` describes the words; the last
    panel is filled up with 0."""
    if weight.bits == 4:
        parts = weight.codes.unflatten(1, (-1, 2, 2, 4))  # [out, 32 inputs, j, i, t]; h in a byte
        first, second = parts.unbind(3)
        pairs = [(first & 15) | (second << 4), (first >> 4) | (second & 0xF0)]
        data = torch.stack(pairs, dim=-1).permute(0, 1, 3, 4, 2)  # [out, 32 inputs, t, h, j]
    else:
        parts = weight.codes.unflatten(1, (-1, 2, 4, 2))  # [out, 16 inputs, i, t, h]
        data = parts.permute(0, 1, 3, 2, 4)
    words = data.flatten(1).contiguous().view(torch.int32)
    padded = F.pad(words, (0, 0, 0, -len(words) % PANEL))
    steps = weight.in_features // step
    return padded.view(-1, PANEL, steps, words.shape[1] // steps).transpose(1, 2).contiguous()


def _columns(scales: torch.Tensor) -> torch.Tensor:
    """``[groups, outputs]`` from ``[outputs, groups]``, outputs filled up to whole panels."""
    return F.pad(scales.T, (0, -len(scales) % PANEL)).contiguous()


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
