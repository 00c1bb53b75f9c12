"""Attention over keys and values that lie side by side in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pageloom.contract import LayerSpec

SCORES = 1 << 24  # most scores that `explicit_attention` holds at a time


class CausalMasks:
    """Additive causal masks, with a sliding window or without, cut from one tensor per window.

    Only how far back a token lies says whether it is seen, so the mask for the last ``rows`` of
    ``length`` tokens is found anywhere on the diagonal of a larger one, and a tensor of hardly more
    than `ROWS` rows serves every chunk of every sequence. It is cut where its rows begin at
    multiples of `ALIGNMENT` elements: a kernel of torch's for GPUs refuses others.
    """

    ROWS = 256  # query rows per call: fewer cost calls, more cost scores above the diagonal
    ALIGNMENT = 8  # 16 bytes of the smallest dtypes

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._empty = torch.empty(self.ROWS, 0, dtype=dtype, device=device)
        self._masks: dict[int | None, torch.Tensor] = {}

    def cut(self, rows: int, length: int, window: int | None) -> torch.Tensor:
        """0 where a token is seen and -inf elsewhere: ``[rows, length]``, a view.

        ``rows`` is at most `ROWS` and at most ``length``.
        """
        mask = self._masks.get(window, self._empty)
        if length > mask.shape[1]:
            mask = self._masks[window] = self._build(max(length, 2 * mask.shape[1]), window)
        before = (mask.shape[1] - length) // self.ALIGNMENT * self.ALIGNMENT
        behind = mask.shape[1] - length - before
        end = mask.shape[0] - behind
        return mask[end - rows : end, before : before + length]

    def _build(self, length: int, window: int | None) -> torch.Tensor:
        length = -(-length // self.ALIGNMENT) * self.ALIGNMENT
        rows = self.ROWS + self.ALIGNMENT
        key = torch.arange(length, device=self._empty.device)
        query = torch.arange(length - rows, length, device=self._empty.device)
        distance = query.unsqueeze(1) - key
        hidden = distance < 0
        if window is not None:
            hidden |= distance >= window
        return self._empty.new_zeros(hidden.shape).masked_fill_(hidden, -torch.inf)


def seen_tokens(spec: LayerSpec, length: int, n: int) -> int:
    """How many of a sequence's ``length`` tokens the last ``n`` of them see, together."""
    return length if spec.window is None else min(length, n + spec.window - 1)


def attend_decodes(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: LayerSpec,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of the last token of b sequences: ``[b, num_heads, head_size]``, like ``q``.

    ``k`` and ``v`` are ``[b, num_kv_heads, length, head_size]`` and hold what the token sees;
    ``mask``, added to the scores, is ``[b, 1, 1, length]`` or None; ``sinks`` is ``[num_heads]``.
    """
    # The query heads of a KV head are rows of one product, so that K and V are read once.
    heads = _split_heads(spec)
    if sinks is not None:
        sinks = sinks.view(*heads, 1)
    return attend(q.view(-1, *heads, spec.head_size), k, v, spec, mask, sinks).flatten(1, 2)


def attend_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    spec: LayerSpec,
    masks: CausalMasks,
    sinks: torch.Tensor | None,
) -> None:
    """Causal attention of one sequence's last n tokens.

    ``q`` and ``out`` are ``[n, num_heads, head_size]``; ``k`` and ``v`` are ``[num_kv_heads,
    length, head_size]``, end with the same n tokens and hold at least what those see.
    """
    n, length, heads = len(q), k.shape[1], _split_heads(spec)
    # A KV head is a batch of its own, and its query heads share it by a broadcast that copies
    # nothing: q is [num_kv_heads, query heads of each, n, head_size].
    q, out = (x.view(n, *heads, -1).permute(1, 2, 0, 3) for x in (q, out))
    k, v = (x.unsqueeze(1).expand(-1, heads[1], -1, -1) for x in (k, v))
    if n == length == seen_tokens(spec, length, 1) and not needs_scores(spec, sinks):
        out.copy_(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=spec.scale))
        return
    rows = masks.ROWS
    if needs_scores(spec, sinks):
        rows = min(rows, max(1, SCORES // (spec.num_heads * length)))
    if sinks is not None:
        sinks = sinks.view(*heads, 1, 1)
    for start in range(0, n, rows):
        end = min(start + rows, n)
        high = length - n + end
        low = high - seen_tokens(spec, high, end - start)
        mask = masks.cut(end - start, high - low, spec.window)
        keys, values = k[:, :, low:high], v[:, :, low:high]
        out[:, :, start:end] = attend(q[:, :, start:end], keys, values, spec, mask, sinks)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: LayerSpec,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention of ``q [a, b, n, head_size]`` over ``k`` and ``v [a, b, length, head_size]``.

    ``mask`` is added to the scores and broadcasts to ``[a, b, n, length]``, ``sinks`` to ``[a, b,
    n, 1]``. Softmax is computed in float32 at least.
    """
    if needs_scores(spec, sinks):
        return explicit_attention(q, k, v, spec, mask, sinks)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=spec.scale)


def needs_scores(spec: LayerSpec, sinks: torch.Tensor | None) -> bool:
    """Whether a layer does to its scores what `scaled_dot_product_attention` does not offer."""
    return spec.softcap is not None or sinks is not None


def explicit_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: LayerSpec,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """`attend` with all scores in memory, for softcap (Gemma 2) and sinks (gpt-oss)."""
    dtype = torch.promote_types(q.dtype, torch.float32)
    scores = (q.to(dtype) * spec.scale) @ k.to(dtype).transpose(-1, -2)
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        sink = sinks.to(dtype).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[-2]]
    return (weights @ v.to(dtype)).to(q.dtype)


def _split_heads(spec: LayerSpec) -> tuple[int, int]:
    return spec.num_kv_heads, spec.num_heads // spec.num_kv_heads
