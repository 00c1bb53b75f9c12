"""Log-probabilities of chosen and of likeliest tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.scheduling.params import MAX_LOGPROBS


def score_tokens(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Score token i of ``token_ids`` (int64 [N]) under row i of ``logits`` (float32 [N, V]).

    Returns logprobs float32 [N], ranks int32 [N], and at least the ``num_top`` likeliest tokens,
    best first: ids int32 [N, K] and logprobs float32 [N, K]. All are ``logit - logsumexp``, so
    equal logits have equal logprobs to the last bit. A row that is no distribution (NaN, +inf, or
    all -inf) has logprobs NaN. Sorts nothing if ``num_top`` is 0.
    """
    norm = logits.logsumexp(1, keepdim=True)
    norm = norm.masked_fill(~norm.isfinite(), math.nan)
    chosen = logits.gather(1, token_ids[:, None])
    # Comparing into floats: torch sums those many times faster than booleans. Exact to 2**24.
    likelier = torch.gt(logits, chosen, out=torch.empty_like(logits))
    ranks = likelier.sum(1).to(torch.int32) + 1
    if num_top == 0:
        top, top_ids = norm[:, :0], ranks[:, None][:, :0]
    else:
        # Always as many: which of equal logits are picked may depend on how many are asked for,
        # and so on what other rows of the batch ask for. It costs no more.
        top, top_ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=1)
    return (chosen - norm)[:, 0], ranks, top_ids.to(torch.int32), top - norm


def build_logprobs(
    token_ids: Sequence[int],
    nums_top: Sequence[int],
    logprobs: torch.Tensor,
    ranks: torch.Tensor,
    top_ids: torch.Tensor,
    top_logprobs: torch.Tensor,
) -> list[TokenLogprobs]:
    """Make what `score_tokens` computed, now on the CPU, into values for clients; row i gets
    ``nums_top[i]`` of its likeliest tokens."""
    rows = zip(
        token_ids,
        nums_top,
        logprobs.tolist(),
        ranks.tolist(),
        top_ids.tolist(),
        top_logprobs.tolist(),
        strict=True,
    )
    return [
        TokenLogprobs(token_id, logprob, rank, tuple(zip(ids[:num], values[:num], strict=True)))
        for token_id, num, logprob, rank, ids, values in rows
    ]
