"""Rotary position embedding: from GGUF metadata to ``rope_parameters`` of `transformers`."""

from __future__ import annotations

import math
from typing import Any

import torch

from pageloom_quant.gguf.dequantize import read_rows
from pageloom_quant.gguf.reader import GGUFFile

LLAMA_CPP_FREQ_BASE = 10000.0  # what its files mean when they do not say


def rope_parameters(file: GGUFFile, head_size: int) -> dict[str, Any]:
    """The parameters of layers that attend globally.

    llama.cpp stores the frequencies of Llama 3.1 as one factor per pair of dimensions
    (``rope_freqs.weight``), not as the numbers they were computed from. ``longrope`` with the
    same factors for short and long sequences divides by exactly those.
    """
    prefix = file.require("general.architecture", str)
    scaling = f"{prefix}.rope.scaling"
    rotary = file.get(f"{prefix}.rope.dimension_count", int, head_size)
    parameters: dict[str, Any] = {
        "rope_theta": file.factor(f"{prefix}.rope.freq_base", LLAMA_CPP_FREQ_BASE)
    }
    if rotary != head_size:
        if prefix != "phi3":
            raise file.error(
                f"rotates {rotary} of {head_size} dimensions of a head, which {prefix} does not"
            )
        if not 2 <= rotary <= head_size or rotary % 2:
            raise file.error(
                f"rotates {rotary} dimensions of a head, which must be even and from 2 to "
                f"{head_size}"
            )
        parameters["partial_rotary_factor"] = rotary / head_size
    trained = original = file.positive(f"{prefix}.context_length")
    if f"{scaling}.original_context_length" in file.metadata:
        original = file.positive(f"{scaling}.original_context_length")
    if "rope_factors_long.weight" in file.tensors:
        return parameters | {
            "rope_type": "longrope",
            "long_factor": _factors(file, "rope_factors_long.weight", rotary),
            "short_factor": _factors(file, "rope_factors_short.weight", rotary),
            "attention_factor": file.factor(f"{scaling}.attn_factor", 1.0),
            "factor": trained / original,
            "original_max_position_embeddings": original,
        }
    kind = file.get(f"{scaling}.type", str, "none")
    if "rope_freqs.weight" in file.tensors:
        if kind != "none":
            raise file.error(f"has both tensor 'rope_freqs.weight' and rope scaling {kind!r}")
        factors = _factors(file, "rope_freqs.weight", rotary)
        return parameters | {
            "rope_type": "longrope",
            "long_factor": factors,
            "short_factor": factors,
            "attention_factor": 1.0,
            "factor": 1.0,
            "original_max_position_embeddings": trained,
        }
    return parameters | _scaling(file, kind, original)


def _scaling(file: GGUFFile, kind: str, original: int) -> dict[str, Any]:
    if kind == "none":
        return {"rope_type": "default"}
    if kind not in ("linear", "yarn"):
        raise file.error(
            f"has rope scaling {kind!r} without its tensors; none, linear and yarn need no tensors"
        )
    prefix = f"{file.require('general.architecture', str)}.rope.scaling"
    factor = file.factor(f"{prefix}.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    # YaRN (arXiv 2309.00071), section 3.4: attention grows with the logarithm of the factor.
    attention = file.factor(f"{prefix}.attn_factor", 1.0) * (0.1 * math.log(factor) + 1.0)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        "attention_factor": attention,
        "beta_fast": file.factor(f"{prefix}.yarn_beta_fast", 32.0),
        "beta_slow": file.factor(f"{prefix}.yarn_beta_slow", 1.0),
    }


def _factors(file: GGUFFile, name: str, rotary: int) -> list[float]:
    info = file.tensors.get(name)
    if info is None:
        raise file.error(f"has no tensor {name!r}")
    if info.shape != (rotary // 2,):
        raise file.error(
            f"has shape {list(info.shape)} in tensor {name!r}, where its metadata gives "
            f"[{rotary // 2}]"
        )
    factors = read_rows(file, name, file.rows(name)).flatten().to(torch.float32)
    if not bool((factors > 0).all()):
        raise file.error(f"has factors in tensor {name!r} that are not positive")
    return factors.tolist()
