"""Unpacking agrees with `gguf.dequantize`, bit for bit, whatever the bytes."""

from __future__ import annotations

import warnings

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

from pageloom_quant.gguf.dequantize import dequantize

FORMATS = ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q6_K", "IQ4_NL"]


def random_rows(kind: GGMLQuantizationType, rows: int = 37, blocks: int = 3) -> torch.Tensor:
    """Random bytes: scales may be anything, NaN and infinities included."""
    size = GGML_QUANT_SIZES[kind][1]
    noise = np.random.default_rng(0).integers(0, 256, (rows, blocks * size), dtype=np.uint8)
    return torch.from_numpy(noise)


@pytest.mark.parametrize("name", FORMATS)
def test_it_is_what_gguf_computes(name: str) -> None:
    kind = GGMLQuantizationType[name]
    rows = random_rows(kind)
    with np.errstate(all="ignore"), warnings.catch_warnings(action="ignore"):
        expected = gguf.dequantize(rows.numpy(), kind)
        result = dequantize(rows, kind)
    assert result.dtype == torch.float32
    assert result.shape == (37, 3 * GGML_QUANT_SIZES[kind][0])
    assert np.array_equal(result.numpy(), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0"])
def test_it_undoes_quantizing(name: str) -> None:
    kind = GGMLQuantizationType[name]
    weight = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    rows = torch.from_numpy(gguf.quantize(weight, kind))
    error = (dequantize(rows, kind) - torch.from_numpy(weight)).abs().max()
    assert 0 < error < (0.02 if name == "Q8_0" else 0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_unquantized_tensors_keep_their_dtype(dtype: torch.dtype) -> None:
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "float64": "F64"}
    weight = torch.randn(4, 8, dtype=torch.float64).to(dtype)
    result = dequantize(weight.view(torch.uint8), GGMLQuantizationType[kind[str(dtype)[6:]]])
    assert result.dtype == dtype
    assert torch.equal(result, weight)


def test_integers_are_refused() -> None:
    with pytest.raises(NotImplementedError):
        dequantize(torch.zeros(1, 8, dtype=torch.uint8), GGMLQuantizationType.I32)
