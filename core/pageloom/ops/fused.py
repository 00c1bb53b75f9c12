# ruff: noqa: N803  (constants are in capitals, as is usual in kernels)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""What lies between the large multiplications of a layer, one Triton kernel each, for GPUs.

Each reads its operands once and writes its result once, where torch would launch two to five
kernels that go through memory. Arithmetic is float32, rounded where torch rounds, except that a
rotation is rounded once. Results are those of the functions in ``norm``, ``rope`` and
``activation``, which choose; shapes and dtypes are described there. Keys and values are stored by
the attention backend, in a format of its own; one that rotates as it stores
(`AttentionBackend.fuses_rotary`) makes the rotation here unnecessary.

Under ``TRITON_INTERPRET=1`` these run on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MAX_ROW = 1 << 14
"""Elements that `add_rms_norm` can hold of a row in the registers of one program."""

TILE = 1024  # elements that a program of the other two kernels works on
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": True}


@triton.jit
def add_rms_norm_kernel(
    out, x, residual, weight, eps, SIZE: tl.constexpr, WIDTH: tl.constexpr
):  # all [rows, SIZE] but weight
    """Grid: rows. WIDTH is the power of 2 that holds SIZE."""
    at = tl.arange(0, WIDTH)
    mask = at < SIZE
    row = tl.program_id(0).to(tl.int64) * SIZE + at
    dtype = out.dtype.element_ty
    total = tl.load(residual + row, mask=mask, other=0.0).to(tl.float32)
    total += tl.load(x + row, mask=mask, other=0.0).to(tl.float32)
    rounded = total.to(dtype)
    tl.store(residual + row, rounded, mask=mask)
    total = rounded.to(tl.float32)
    total *= tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    scale = tl.load(weight + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row, (total.to(dtype).to(tl.float32) * scale).to(dtype), mask=mask)


@triton.jit
def rotate_kernel(
    x,  # [rows, HEADS, SIZE], rows strided by x_row elements
    weight,  # [HEADS, SIZE] or None
    cos,  # [rows, SIZE]
    sin,
    x_row,
    eps,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,  # the power of 2 that holds half a head
):
    """Grid: rows, and heads / TILE_HEADS."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    middle: tl.constexpr = SIZE // 2
    at = tl.arange(0, WIDTH)[None, :]
    half = at < middle
    mask = (head < HEADS) & half
    dtype = x.dtype.element_ty
    left_at = x + row * x_row + head * SIZE + at
    left = tl.load(left_at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(left_at + middle, mask=mask, other=0.0).to(tl.float32)
    if weight is not None:
        squares = tl.sum(left * left, 1) + tl.sum(right * right, 1)
        scale = tl.rsqrt(squares / SIZE + eps)[:, None]
        weight_at = weight + head * SIZE + at
        by = tl.load(weight_at, mask=mask, other=0.0).to(tl.float32)
        left = ((left * scale).to(dtype).to(tl.float32) * by).to(dtype).to(tl.float32)
        by = tl.load(weight_at + middle, mask=mask, other=0.0).to(tl.float32)
        right = ((right * scale).to(dtype).to(tl.float32) * by).to(dtype).to(tl.float32)
    cos_at, sin_at = cos + row * SIZE + at, sin + row * SIZE + at
    c = tl.load(cos_at, mask=half, other=0.0).to(tl.float32)
    s = tl.load(sin_at, mask=half, other=0.0).to(tl.float32)
    tl.store(left_at, (left * c + right * s).to(dtype), mask=mask)
    c = tl.load(cos_at + middle, mask=half, other=0.0).to(tl.float32)
    s = tl.load(sin_at + middle, mask=half, other=0.0).to(tl.float32)
    tl.store(left_at + middle, (right * c + left * s).to(dtype), mask=mask)


@triton.jit
def silu_and_mul_kernel(out, gate_up, SIZE: tl.constexpr, TILE: tl.constexpr):
    """Grid: rows, and SIZE / TILE."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = at < SIZE
    dtype = out.dtype.element_ty
    gate = tl.load(gate_up + row * 2 * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * SIZE + at, mask=mask, other=0.0).to(tl.float32)
    gate = (gate * tl.sigmoid(gate)).to(dtype).to(tl.float32)
    tl.store(out + row * SIZE + at, (gate * up).to(dtype), mask=mask)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """`norm.add_rms_norm` with a ``weight [D]``, D up to `MAX_ROW`; ``residual`` is contiguous."""
    out = torch.empty_like(residual)
    size = out.shape[-1]
    if out.numel():
        with torch.cuda.device_of(out):  # Triton launches on the current device
            add_rms_norm_kernel[out.numel() // size,](
                out, x.contiguous(), residual, weight, eps, **norm_constants(size)
            )
    return out


def rotate_(
    x: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """`rope.rotate_`, or with ``weight [H, D]`` and ``eps`` `rope.norm_rotate_`."""
    rows, heads, size = x.shape
    constants = rotate_constants(heads, size)
    if rows:
        with torch.cuda.device_of(x):
            rotate_kernel[rows, triton.cdiv(heads, constants["TILE_HEADS"])](
                x, weight, cos, sin, x.stride(0), eps, **constants
            )
    return x


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`activation.silu_and_mul`."""
    rows, width = gate_up.shape
    out = gate_up.new_empty(rows, width // 2)
    if rows:
        with torch.cuda.device_of(out):
            silu_and_mul_kernel[rows, triton.cdiv(width // 2, TILE)](
                out, gate_up.contiguous(), **silu_constants(width // 2)
            )
    return out


def norm_constants(size: int) -> dict[str, Any]:
    """What the kernel is compiled with for rows of ``size`` elements."""
    width = triton.next_power_of_2(size)
    return {"SIZE": size, "WIDTH": width, **OPTIONS, "num_warps": min(max(width // 1024, 4), 16)}


def rotate_constants(heads: int, size: int) -> dict[str, Any]:
    """The same for rows of ``heads`` heads of ``size`` elements."""
    width = triton.next_power_of_2(size // 2)
    tile_heads = min(max(TILE // (2 * width), 1), triton.next_power_of_2(heads))
    return {"HEADS": heads, "SIZE": size, "TILE_HEADS": tile_heads, "WIDTH": width, **OPTIONS}


def silu_constants(size: int) -> dict[str, Any]:
    """The same for results of ``size`` elements per row."""
    return {"SIZE": size, "TILE": TILE, **OPTIONS}
