"""From GGUF blocks to weights that stay packed.

Every number of a block is ``code * scale + minimum`` with one scale and minimum for the 32 of it.
"""

from __future__ import annotations

import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pageloom_quant.kv.codes import pack_nibbles
from pageloom_quant.packed import PackedWeight

BITS = {
    GGMLQuantizationType.Q4_0: 4,
    GGMLQuantizationType.Q4_1: 4,
    GGMLQuantizationType.Q8_0: 8,
}
"""The types that can stay packed, and the bits of their codes."""


def packed_weight(rows: torch.Tensor, kind: GGMLQuantizationType) -> PackedWeight:
    """The weight in ``rows``, uint8 ``[outputs, bytes per row]``, of one of the types in `BITS`.

    `PackedWeight.dequantize` of it is what `dequantize` makes of the rows.
    """
    group, size = GGML_QUANT_SIZES[kind]
    blocks = rows.view(rows.shape[0], -1, size)
    scales = blocks[..., :2].contiguous().view(torch.float16).squeeze(2)
    if kind is GGMLQuantizationType.Q4_1:
        minimums = blocks[..., 2:4].contiguous().view(torch.float16).squeeze(2)
        return PackedWeight(_nibbles(blocks[..., 4:]), scales, minimums, group)
    if kind is GGMLQuantizationType.Q4_0:
        return PackedWeight(_nibbles(blocks[..., 2:]), scales, scales.float() * -8, group)
    codes = blocks[..., 2:].flatten(1) ^ 0x80  # from signed to 0 to 255
    return PackedWeight(codes, scales, scales.float() * -128, group, bits=8)


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """From bytes that hold numbers ``i`` and ``i + 16`` to bytes that hold neighbours."""
    return pack_nibbles(torch.cat((data & 15, data >> 4), dim=-1)).flatten(1)
