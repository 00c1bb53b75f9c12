"""Log-probabilities as clients see them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model found one token, and which tokens it found likeliest.

    Values are natural logarithms of the model's own distribution: before logit bias, penalties,
    temperature and truncation.
    """

    token_id: int
    logprob: float
    rank: int  # 1 + how many tokens of the vocabulary are likelier
    top: tuple[tuple[int, float], ...]  # (token id, logprob), likeliest first; as many as asked
