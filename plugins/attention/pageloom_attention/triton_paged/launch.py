"""The constants and options with which each kernel is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton.language as tl

from pageloom.contract import LayerSpec, VectorLayout
from pageloom.contract.quantizer import Element
from pageloom_attention.triton_paged.tiles import SCALE_BYTES, Family, Tiles, power_of_2, vectors

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FUSION = {"enable_fp_fusion": True}  # Triton warns that its default will change
LOG2E = 1.4426950408889634
LIMITS: Mapping[Element, float] = MappingProxyType(
    {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}
)
UNITS: Mapping[Element, float] = MappingProxyType(
    {"fp8_e4m3": 256.0, "fp8_e5m2": 32768.0, "int8": 64.0, "int4": 4.0}
)
"""Scales are smaller than what they scale by about so much."""


@cache
def store(
    layer: LayerSpec,
    block_size: int,
    dtype: torch.dtype,
    family: Family,
    layout: VectorLayout | None,
) -> dict[str, Any]:
    """``dtype`` is that of K and V."""
    most = torch.finfo(torch.float16 if layout and layout.element == "int4" else dtype).max
    return {
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "KV_HEADS": layer.num_kv_heads,
        "HEAD_SIZE": layer.head_size,
        "BLOCK_SIZE": block_size,
        **_format(layer, layout),
        "LIMIT": LIMITS[layout.element] if layout else None,
        "MOST": 0.875 * most if layout else None,
        "VECTORS": vectors(family, layer.head_size),
        "WIDTH": power_of_2(layer.head_size),
        "num_warps": 4,
        "enable_fp_fusion": False,  # it would skip a rounding, and so change codes
    }


@cache
def attend(
    layer: LayerSpec,
    block_size: int,
    dtype: torch.dtype,
    family: Family,
    layout: VectorLayout | None,
    tiles: Tiles,
) -> dict[str, Any]:
    """``dtype`` is what matrices are multiplied in."""
    # NVIDIA's matrix units have no float32: it goes through them in three parts, which keeps
    # about its precision.
    in_parts = dtype is torch.float32 and family != "amd"
    return {
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "KV_HEADS": layer.num_kv_heads,
        "HEAD_SIZE": layer.head_size,
        "BLOCK_SIZE": block_size,
        **_format(layer, layout),
        "NATIVE": family == "hopper",
        "UNIT": _unit(dtype, layout),
        "WINDOW": layer.window,
        "ROWS": tiles.rows,
        "TILE": tiles.tokens,
        "WIDTH": power_of_2(layer.head_size),
        "DTYPE": DTYPES[dtype],
        "PRECISION": "tf32x3" if in_parts else "ieee",
        "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages,
        **FUSION,
    }


@cache
def merge(layer: LayerSpec, tiles: Tiles) -> dict[str, Any]:
    return {
        "GROUP": layer.num_heads // layer.num_kv_heads,
        "KV_HEADS": layer.num_kv_heads,
        "HEAD_SIZE": layer.head_size,
        "ROWS": tiles.rows,
        "WIDTH": power_of_2(layer.head_size),
        "SPLITS": 16,
        "num_warps": 4,
        **FUSION,
    }


def inverses(k_scale: float, v_scale: float) -> tuple[float, float]:
    """The arguments ``k_inverse`` and ``v_inverse`` of `kernels.store_kernel` for constant scales,
    inverted in float32 as formats do."""
    both = 1 / torch.tensor([k_scale, v_scale], dtype=torch.float32)
    return both[0].item(), both[1].item()


def scales(
    layer: LayerSpec,
    dtype: torch.dtype,
    layout: VectorLayout | None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> tuple[float, float | None, float | None]:
    """The arguments ``scale``, ``cap`` and ``v_scale`` of `kernels.attend_kernel`.

    ``dtype`` is what matrices are multiplied in, ``k_scale`` and ``v_scale`` are constant scales.
    """
    results = v_scale / _unit(dtype, layout) if layout else None
    if layer.softcap is None:
        return k_scale * layer.scale * LOG2E, None, results
    scale = 2 * LOG2E * k_scale * layer.scale / layer.softcap
    return scale, layer.softcap * LOG2E, results


def _format(layer: LayerSpec, layout: VectorLayout | None) -> dict[str, Any]:
    if layout is None:
        return {"ROW": layer.head_size, "ELEMENT": None, "SCALED": False}
    width = layout.bytes_per_vector(layer.head_size)
    scaled = layout.scaling == "token_head"
    return {
        "ROW": width - SCALE_BYTES if scaled else width,
        "ELEMENT": layout.element,
        "SCALED": scaled,
    }


def _unit(dtype: torch.dtype, layout: VectorLayout | None) -> float:
    """What scales of V are multiplied by before they multiply weights, and results divided by.

    So float16 weights are about as precise as float16 elements of V would be. The other dtypes have
    exponents enough, and such a multiple of the largest results would be too large.
    """
    if layout is None or layout.scaling == "static" or dtype is not torch.float16:
        return 1.0
    return UNITS[layout.element]
