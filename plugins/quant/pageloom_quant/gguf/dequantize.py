"""From packed GGUF blocks to numbers.

Q4_0, Q4_1 and Q8_0 are unpacked with torch, over all blocks of a tensor at once: the same
arithmetic as `gguf.dequantize`, bit for bit, five times as fast as its walk over groups of 16
rows. Every other block format goes through `gguf.dequantize`.

Block layouts: https://github.com/ggml-org/llama.cpp/blob/master/ggml/src/ggml-common.h
"""

from __future__ import annotations

import gguf
import torch
from gguf import GGMLQuantizationType

from pageloom_quant.gguf.reader import GGUFFile

PLAIN = {
    GGMLQuantizationType.F64: torch.float64,
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}


def dequantize(rows: torch.Tensor, kind: GGMLQuantizationType) -> torch.Tensor:
    """Numbers ``[rows, elements]`` from ``uint8 [rows, bytes per row]``.

    Unquantized tensors keep their dtype (a view of ``rows``), quantized ones become float32.
    Raises `NotImplementedError` for a type that holds no floating-point weights.
    """
    if kind in PLAIN:
        return rows.view(PLAIN[kind])
    if kind in BLOCKS:
        size, unpack = BLOCKS[kind]
        return unpack(rows.view(-1, size)).view(rows.shape[0], -1)
    return torch.from_numpy(gguf.dequantize(rows.numpy(), kind))


def read_rows(file: GGUFFile, name: str, rows: torch.Tensor) -> torch.Tensor:
    """`dequantize` of rows of the tensor ``name``. Raises `ValueError` that names it if its type
    holds no weights."""
    kind = file.tensors[name].type
    try:
        return dequantize(rows, kind)
    except NotImplementedError:
        raise file.error(
            f"has type {kind.name} in tensor {name!r}, which cannot be unpacked"
        ) from None


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    """``d`` as f16, then 16 bytes of two 4-bit numbers around 8."""
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_halves(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    """``d`` and ``m`` as f16, then 16 bytes of two 4-bit numbers from 0."""
    scales = _halves(blocks[:, :4])
    return _nibbles(blocks[:, 4:]).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    """``d`` as f16, then 32 signed bytes."""
    return blocks[:, 2:].view(torch.int8) * _halves(blocks[:, :2])


def _halves(data: torch.Tensor) -> torch.Tensor:
    return data.contiguous().view(torch.float16).float()


def _nibbles(data: torch.Tensor) -> torch.Tensor:
    """Float32 ``[blocks, 32]``: the low halves of 16 bytes, then the high halves."""
    out = torch.empty(data.shape[0], 32)
    out[:, :16] = data & 0xF
    out[:, 16:] = data >> 4
    return out


BLOCKS = {
    GGMLQuantizationType.Q4_0: (18, _q4_0),
    GGMLQuantizationType.Q4_1: (20, _q4_1),
    GGMLQuantizationType.Q8_0: (34, _q8_0),
}
