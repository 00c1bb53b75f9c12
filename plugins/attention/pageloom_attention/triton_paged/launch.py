"""The constants and options with which each kernel is compiled."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton.language as tl

from pageloom.contract import LayerSpec
from pageloom_attention.triton_paged.tiles import Family, Tiles, power_of_2, vectors

DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}
FUSION = {"enable_fp_fusion": True}  # Triton warns that its default will change
LOG2E = 1.4426950408889634


@cache
def store(layer: LayerSpec, block_size: int, family: Family) -> dict[str, Any]:
    return {
        "KV_HEADS": layer.num_kv_heads,
        "HEAD_SIZE": layer.head_size,
        "BLOCK_SIZE": block_size,
        "VECTORS": vectors(family, layer.head_size),
        "WIDTH": power_of_2(layer.head_size),
        "num_warps": 4,
        **FUSION,
    }


@cache
def attend(
    layer: LayerSpec, block_size: int, dtype: torch.dtype, family: Family, tiles: Tiles
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


@cache
def scales(layer: LayerSpec) -> tuple[float, float | None]:
    """The arguments ``scale`` and ``cap`` of `kernels.attend_kernel`."""
    if layer.softcap is None:
        return layer.scale * LOG2E, None
    return 2 * LOG2E * layer.scale / layer.softcap, layer.softcap * LOG2E
