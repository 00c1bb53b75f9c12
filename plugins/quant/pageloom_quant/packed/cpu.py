"""The packed linear layer on a CPU, in C++."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from pageloom.contract import native
from pageloom_quant.packed.weight import PackedWeight

SOURCE = Path(__file__).parent.parent / "native" / "packed_linear.cpp"
# Sums keep their order, so results are the same on every run; these only let loops vectorise.
FLAGS = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by number, as in the source
STEP = 32  # inputs, as in the source
PANEL = 32  # outputs, as in the source
EXPAND_ROWS = 64
"""Rows from which matrix units are worth it that only whole bfloat16 matrices can use (AMX)."""
BLOCK_ELEMENTS = 1 << 22  # of the weight, expanded at a time
SIGN_BITS = {4: 0x88, 8: 0x80}  # of the codes in a byte


class _Weight(ctypes.Structure):
    """As in native/packed_linear.cpp."""

    _fields_ = (
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("offsets", c_void_p),
        ("bits", c_int64),
        ("halves", c_int64),
        ("outputs", c_int64),
        ("inputs", c_int64),
        ("group", c_int64),
    )


class CPULinear(nn.Module):
    """``x W^T + b`` with codes widened in registers and products summed in float32.

    A row's result does not depend on the other rows. On CPUs with AMX, `EXPAND_ROWS` rows or more
    of bfloat16 are multiplied by oneDNN instead, by weights that are expanded, and so rounded, a
    block of outputs at a time. The source is compiled when the first such layer is made on a
    machine; raises `NativeBuildError` where that fails.
    """

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        library = load_library()
        self._multiply = library.pageloom_packed_linear
        self._expand = library.pageloom_packed_expand
        self._expands = dtype == torch.bfloat16 and has_amx()
        self._bias = None if bias is None else bias.to("cpu", dtype).contiguous()
        self._dtype = DTYPES.index(dtype)
        self.weight_format = weight.format
        self._outputs = weight.out_features
        self._codes = arrange_codes(weight)
        self._scales, self._offsets = arrange_scales(weight, dtype)
        self._weight = _Weight(
            codes=self._codes.data_ptr(),
            scales=self._scales.data_ptr(),
            offsets=None if self._offsets is None else self._offsets.data_ptr(),
            bits=weight.bits,
            halves=self._scales.dtype == torch.float16,
            outputs=weight.out_features,
            inputs=weight.in_features,
            group=weight.group_size,
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dtype != DTYPES[self._dtype] or x.shape[-1] != self._weight.inputs:
            raise ValueError(
                f"a layer of {self._weight.inputs} inputs in {DTYPES[self._dtype]} cannot multiply "
                f"{x.dtype} {list(x.shape)}"
            )
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], self._outputs)
        rows = x.numel() // self._weight.inputs
        if self._expands and rows >= EXPAND_ROWS:
            self._multiply_blocks(x.view(rows, -1), out.view(rows, -1))
            return out
        self._multiply(
            self._weight,
            self._dtype,
            x.data_ptr(),
            rows,
            None if self._bias is None else self._bias.data_ptr(),
            out.data_ptr(),
        )
        return out

    def _multiply_blocks(self, x: torch.Tensor, out: torch.Tensor) -> None:
        inputs = self._weight.inputs
        panels = -(-self._outputs // PANEL)
        most = max(1, BLOCK_ELEMENTS // (inputs * PANEL))
        for begin in range(0, panels, most):
            end = min(begin + most, panels)
            block = x.new_empty(inputs, (end - begin) * PANEL)
            self._expand(self._weight, self._dtype, begin, end, block.data_ptr())
            part = slice(begin * PANEL, min(end * PANEL, self._outputs))
            product = x @ block[:, : part.stop - part.start]
            out[:, part] = product if self._bias is None else product + self._bias[part]


def fits(weight: PackedWeight) -> bool:
    """Whether `CPULinear` can hold ``weight``."""
    return weight.group_size % STEP == 0


def why_not(dtype: torch.dtype) -> str | None:
    """Why there is no `CPULinear` of ``dtype`` here, as the end of a sentence; None if there is."""
    if dtype not in DTYPES:
        return f"the native code computes in float32, bfloat16 and float16, not {dtype}"
    return _build_problem()


def has_amx() -> bool:
    """Whether this CPU has matrix units that oneDNN uses."""
    return bool(torch.cpu._is_amx_tile_supported())


def arrange_codes(weight: PackedWeight) -> torch.Tensor:
    """The codes in words and panels, as native/codes.h describes them, less half their range."""
    signed = weight.codes ^ SIGN_BITS[weight.bits]
    if weight.bits == 4:
        first, second, third, fourth = signed.unflatten(1, (-1, 4)).unbind(2)
        parts = [
            (first & 15) | (second << 4),
            (third & 15) | (fourth << 4),
            (first >> 4) | (second & 0xF0),
            (third >> 4) | (fourth & 0xF0),
        ]
        words = torch.stack(parts, dim=2)
    else:
        words = signed.unflatten(1, (-1, 4))[..., [0, 2, 1, 3]]
    return _panels(words.contiguous().view(torch.int32).squeeze(2))


def arrange_scales(
    weight: PackedWeight, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`PackedWeight.centred` scales and offsets, in panels."""
    scales, offsets = weight.centred(dtype, (torch.float16,))
    return _panels(scales), None if offsets is None else _panels(offsets)


def _panels(rows: torch.Tensor) -> torch.Tensor:
    """``[panels, n, PANEL]`` from ``[outputs, n]``, the last panel filled up with 0."""
    padded = F.pad(rows, (0, 0, 0, -len(rows) % PANEL))
    return padded.view(-1, PANEL, rows.shape[1]).transpose(1, 2).contiguous()


@cache
def load_library(flags: Sequence[str] = FLAGS) -> Any:
    """The native code. Raises `NativeBuildError` if it cannot be compiled."""
    library = native.build(SOURCE, flags)
    library.pageloom_packed_linear.restype = None
    library.pageloom_packed_linear.argtypes = [
        POINTER(_Weight),
        c_int64,
        c_void_p,
        c_int64,
        c_void_p,
        c_void_p,
    ]
    library.pageloom_packed_expand.restype = None
    library.pageloom_packed_expand.argtypes = [POINTER(_Weight), *[c_int64] * 3, c_void_p]
    return library


@cache
def _build_problem() -> str | None:
    try:
        load_library()
    except native.NativeBuildError as error:
        return str(error).splitlines()[0]
    return None


def forget_library() -> None:
    """Look for a compiler again when the native code is next needed."""
    load_library.cache_clear()
    _build_problem.cache_clear()
