"""Tokens that a guide does not let follow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from pageloom.runner.penalties import History, ending_tokens


def apply_masks(logits: torch.Tensor, rows: Sequence[History]) -> None:
    """Set what the masks of ``rows`` exclude to -inf in ``logits`` (float32 [S, V]), in place.

    Masks are as `pageloom.scheduling.structured.Guide.mask` gives them. They go to the device
    packed, eight tokens in a byte.
    """
    guided = [i for i, row in enumerate(rows) if row.mask is not None]
    if not guided:
        return
    vocab = logits.shape[1]
    packed = np.stack([_mask_of(rows[i], vocab) for i in guided])
    bits = torch.tensor([1 << bit for bit in range(8)], dtype=torch.uint8, device=logits.device)
    banned = (torch.from_numpy(packed).to(logits.device).unsqueeze(2) & bits) == 0
    banned = banned.flatten(1)[:, :vocab]
    if len(guided) == len(rows):
        logits.masked_fill_(banned, -math.inf)
    else:
        logits[guided] = logits[guided].masked_fill(banned, -math.inf)


def _mask_of(row: History, vocab: int) -> np.ndarray:
    """``uint8 [ceil(V / 8)]``. Before ``min_tokens`` without what ends the output, unless nothing
    else may follow."""
    packed = np.zeros(-(-vocab // 8), dtype=np.uint8)
    given = np.frombuffer(row.mask or b"", dtype=np.uint8)[: len(packed)]
    packed[: len(given)] = given
    if len(row.output_token_ids) < row.params.min_tokens:
        going_on = packed.copy()
        for token in ending_tokens(row, vocab):
            going_on[token // 8] &= 0xFF ^ (1 << token % 8)
        if going_on.any():
            return going_on
    return packed
