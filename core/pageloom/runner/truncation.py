"""Truncated sampling: min-p, top-k and top-p."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from pageloom.scheduling.params import SamplingParams

# From here on `torch.topk` is slower on the CPU than sorting all of a large vocabulary.
TOP_K_WITHOUT_SORT = 256


def truncate(probs: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Zero the probabilities that each row's min-p, then top-k, then top-p leave out, in place.

    ``probs`` is float32 [N, V], each row summing to 1. What is left is not normalised. Each of
    the three keeps what is at least as likely as the last token it must keep, so all of a row's
    truncation is one threshold: ties are kept, and the outcome does not depend on the order of
    a sort. top-k needs only the k largest values; only top-p without top-k sorts.
    """
    vocab_size = probs.shape[1]
    top_k = [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params]
    min_p = [i for i, p in enumerate(params) if p.min_p > 0]
    few = [i for i, k in enumerate(top_k) if k < vocab_size]
    all_tokens = [i for i, p in enumerate(params) if p.top_p < 1 and top_k[i] == vocab_size]
    cutoff = probs.new_zeros(len(params))
    if min_p:
        shares = probs.new_tensor([params[i].min_p for i in min_p])
        cutoff[min_p] = shares * take_rows(probs, min_p).amax(1)
    for rows in filter(None, (few, all_tokens)):
        k = [top_k[i] for i in rows]
        largest = _largest_ascending(take_rows(probs, rows), max(k))
        top_p = [params[i].top_p for i in rows]
        cutoff[rows] = _cutoff(take_rows(probs, rows), largest, k, top_p, cutoff[rows])
    rows = sorted({*min_p, *few, *all_tokens})
    if not rows:
        return
    chosen = take_rows(probs, rows)
    # Comparing into floats: torch multiplies those several times faster than booleans.
    kept = torch.ge(chosen, take_rows(cutoff, rows)[:, None], out=torch.empty_like(chosen))
    if len(rows) == len(probs):
        probs.mul_(kept)
    else:
        probs[rows] = kept.mul_(chosen)


def take_rows(tensor: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """The named rows, ascending; the tensor itself, not a copy, if that is all of them."""
    return tensor if len(rows) == len(tensor) else tensor[rows]


def _largest_ascending(probs: torch.Tensor, k: int) -> torch.Tensor:
    """At least the ``k`` largest values of each row, smallest first."""
    if k <= TOP_K_WITHOUT_SORT:
        return probs.topk(k, dim=1).values.flip(1)
    if probs.device.type == "cpu":
        # numpy sorts floats with vector instructions, an order of magnitude faster than torch.
        return torch.from_numpy(np.sort(probs.numpy(), axis=1))
    return probs.sort(dim=1).values


def _cutoff(
    probs: torch.Tensor,
    values: torch.Tensor,
    top_k: list[int],
    top_p: list[float],
    floor: torch.Tensor,
) -> torch.Tensor:
    """The smallest value that a row keeps, float32 [N].

    ``values`` (float32 [N, K], ascending) holds the largest probabilities of each row of ``probs``
    (float32 [N, V]); those below ``floor`` (float32 [N]) are out already. top-p drops the longest
    prefix of what top-k left, ties with the k-th included, whose mass is within ``1 - top_p`` of
    the mass left.
    """
    width = values.shape[1]
    first = torch.tensor([[width - k] for k in top_k], device=values.device)
    first = torch.maximum(first, torch.searchsorted(values, floor[:, None]))
    first = first.clamp_(max=width - 1)  # rows of NaN, which the sampler reports
    if min(top_p) < 1:
        first = torch.searchsorted(values, values.gather(1, first)).clamp_(max=width - 1)
        mass = values.cumsum(1)
        below = mass.gather(1, (first - 1).clamp_(min=0)) * (first > 0)
        dropped = values.new_tensor([[1 - p] for p in top_p])
        unlisted = _mass_unlisted(probs, values.gather(1, first), first, width)
        # The mass up to and with each of the kept values is `unlisted` more than in `mass`.
        limit = below + dropped * (mass[:, -1:] + unlisted - below) - unlisted
        nucleus = torch.searchsorted(mass, limit, right=True).clamp_(max=width - 1)
        first = torch.where(dropped > 0, torch.maximum(first, nucleus), first)
    return values.gather(1, first)[:, 0]


def _mass_unlisted(
    probs: torch.Tensor, kth: torch.Tensor, first: torch.Tensor, listed: int
) -> torch.Tensor:
    """The mass of the tokens as likely as ``kth`` that the ``listed`` largest values of each row
    had no room for. All but ``probs`` (float32 [N, V]) are [N, 1]."""
    if listed == probs.shape[1] or not (first == 0).any():
        return torch.zeros_like(kth)
    # Comparing into floats: torch sums those many times faster than booleans. Exact to 2**24.
    kept = torch.ge(probs, kth, out=torch.empty_like(probs)).sum(1, keepdim=True)
    return kth * (kept - (listed - first))
