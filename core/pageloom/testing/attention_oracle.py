"""Attention by its definition, in float64, and how near a backend must come to it."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from pageloom.contract import LayerSpec

TOLERANCE: Mapping[torch.dtype, float] = MappingProxyType(
    {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
)
"""Largest error of an element of the output, relative to its value plus the root mean square of
its vector: some ten roundings of each dtype. An absolute bound would prove nothing in long
contexts, where averaging makes all outputs small. float32 means float32, not TF32."""


def attention(
    q: torch.Tensor,
    positions: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """What the tokens at ``positions`` (``[n]``) of a sequence attend to.

    ``q`` is ``[n, num_heads, head_size]``, ``k`` and ``v`` are ``[length, num_kv_heads,
    head_size]``, the whole sequence from its first token. Returns float64 ``[n, num_heads,
    head_size]``.
    """
    group = layer.num_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    age = positions.unsqueeze(1) - torch.arange(len(k), device=positions.device)
    hidden = age < 0
    if layer.window is not None:
        hidden |= age >= layer.window
    scores.masked_fill_(hidden, -torch.inf)
    if sinks is not None:
        sink = sinks.double().view(-1, 1, 1).expand(-1, len(q), 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : len(k)]
    return torch.einsum("hnl,lhd->nhd", weights, v)


def excess(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Each element's error as a multiple of what `TOLERANCE` allows; infinite if it is no number.

    Both are ``[..., head_size]``, ``expected`` in float64.
    """
    scale = expected.abs() + expected.square().mean(-1, keepdim=True).sqrt()
    floor = torch.finfo(actual.dtype).smallest_normal * torch.finfo(actual.dtype).eps
    error = (actual.double() - expected).abs() / (tolerance * scale + floor)
    return error.nan_to_num(nan=torch.inf, posinf=torch.inf)
