"""From logits to the next token of every row."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import torch

from pageloom.runner.logprobs import build_logprobs, score_tokens
from pageloom.runner.masks import apply_masks
from pageloom.runner.penalties import adjust_logits
from pageloom.runner.transfer import to_host
from pageloom.runner.truncation import truncate
from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.scheduling.params import SamplingParams


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What the next token of one branch is drawn by. Only read."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]  # so far
    eos_token_ids: Collection[int]
    index: int = 0  # of the branch among those that share the seed
    mask: bytes | None = None  # of a guide, see `pageloom.scheduling.structured.Guide.mask`


@dataclass(frozen=True, slots=True)
class SampleOutput:
    token_ids: list[int]  # one per row, 0 for those in `invalid`
    logprobs: list[TokenLogprobs | None]  # one per row, None where the row does not want any
    invalid: list[int]  # rows without a distribution to draw from: their token means nothing


class Sampler:
    """Draws tokens for a batch, each row by its own `SamplingParams`.

    A draw inverts the cumulative distribution at one uniform number per row, which is an order
    of magnitude cheaper on a CPU than noise for every token of the vocabulary. For a row with a
    seed, that number depends only on the seed, the branch and the position in the output, so the
    draw is the same in any batch and after any preemption. Rows without one share the sampler's
    stream.
    """

    def __init__(self, seed: int | None = None) -> None:
        """``seed`` fixes the stream of the rows that have none of their own."""
        self._random = random.Random(seed)

    @torch.inference_mode()
    def sample(self, logits: torch.Tensor, rows: Sequence[SampleRow]) -> SampleOutput:
        """Draw a token for each row of ``logits`` (float32 [S, V]), which is overwritten.

        `SamplingParams` states the order of the steps. Each step touches only the rows that want
        it, and what comes back is one transfer from the device. Rows whose logits hold NaN or
        +inf, or are all -inf once tokens are banned, do not disturb the others: they are listed
        as invalid. Raises `ValueError` if there is not one row for each.
        """
        if len(logits) != len(rows):
            raise ValueError(f"{len(logits)} rows of logits, but {len(rows)} rows to sample")
        scored = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[scored] if scored else None  # a copy, before the logits are changed
        adjust_logits(logits, rows)
        apply_masks(logits, rows)
        tokens, evidence = self._choose(logits, rows)
        results = [tokens.to(torch.int32), evidence]
        nums_top = [rows[i].params.logprobs or 0 for i in scored]
        if raw is not None:
            results += score_tokens(raw, tokens[scored], max(nums_top))
        host_tokens, host_evidence, *host_scores = to_host(*results)
        token_ids = host_tokens.tolist()
        invalid = [i for i, value in enumerate(host_evidence.tolist()) if not math.isfinite(value)]
        logprobs: list[TokenLogprobs | None] = [None] * len(rows)
        if scored:
            built = build_logprobs([token_ids[i] for i in scored], nums_top, *host_scores)
            for i, value in zip(scored, built, strict=True):
                logprobs[i] = value
        for i in invalid:
            token_ids[i], logprobs[i] = 0, None
        return SampleOutput(token_ids, logprobs, invalid)

    @torch.inference_mode()
    def prompt_logprobs(
        self, logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
    ) -> list[TokenLogprobs]:
        """Score the tokens that follow: ``token_ids[i]`` (int64 [N]) under row i of ``logits``
        (float32 [N, V], unchanged), with each row's ``num_top`` likeliest.

        Rows whose logits hold NaN or +inf, or are all -inf, have the log-probability NaN.
        """
        scores = score_tokens(logits, token_ids, num_top)
        tokens, *host_scores = to_host(token_ids.to(torch.int32), *scores)
        return build_logprobs(tokens.tolist(), [num_top] * len(tokens), *host_scores)

    @torch.inference_mode()
    def candidates(self, logits: torch.Tensor, count: int) -> list[list[tuple[int, float]] | None]:
        """The ``count`` likeliest tokens of each row of ``logits`` (float32 [N, V], unchanged), or
        all, with their log-probabilities, likeliest first.

        None for rows whose logits hold NaN or +inf, or are all -inf.
        """
        values, tokens = logits.log_softmax(1).topk(min(count, logits.shape[1]))
        host_tokens, host_values = to_host(tokens.to(torch.int32), values)
        rows = zip(host_tokens.tolist(), host_values.tolist(), strict=True)
        return [None if math.isnan(v[0]) else list(zip(t, v, strict=True)) for t, v in rows]

    def _choose(
        self, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens int64 [S], and float32 [S] that is finite exactly if a row had something to draw
        from: its largest logit or its total probability, to which NaN and infinities spread."""
        greedy = [i for i, row in enumerate(rows) if row.params.greedy]
        drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        if not drawn:
            return _likeliest(logits)
        if not greedy:
            return self._draw(logits, rows)
        tokens = torch.empty(len(rows), dtype=torch.int64, device=logits.device)
        evidence = logits.new_empty(len(rows))
        tokens[greedy], evidence[greedy] = _likeliest(logits[greedy])
        tokens[drawn], evidence[drawn] = self._draw(logits[drawn], [rows[i] for i in drawn])
        return tokens, evidence

    def _draw(
        self, logits: torch.Tensor, rows: Sequence[SampleRow]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        params = [row.params for row in rows]
        if any(p.temperature != 1 for p in params):
            logits.div_(logits.new_tensor([[p.temperature] for p in params]))
        probs = logits.softmax(1)
        truncate(probs, params)
        uniform = probs.new_tensor([[self._uniform(row)] for row in rows])
        return invert_cumulative(probs, uniform)

    def _uniform(self, row: SampleRow) -> float:
        """In [0, 1), with the 24 bits that float32 can hold."""
        if row.params.seed is None:
            bits = self._random.getrandbits(24)
        else:
            counter = struct.pack("<qqq", row.params.seed, row.index, len(row.output_token_ids))
            bits = int.from_bytes(blake2b(counter, digest_size=3).digest(), "little")
        return bits * 2.0**-24


def invert_cumulative(
    weights: torch.Tensor, uniform: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw index i of each row with probability ``weights[row, i] / total``.

    ``weights`` is float32 [N, V] and ``uniform`` float32 [N, 1] in [0, 1). Returns indices int64
    [N] and totals float32 [N]. A weight of 0 is never drawn, unless all are.
    """
    running = weights.cumsum(1)
    total = running[:, -1:]
    below = torch.nextafter(total, torch.zeros_like(total))
    at = torch.searchsorted(running, torch.minimum(uniform * total, below), right=True)
    at = at.clamp_(max=weights.shape[1] - 1)
    # The sum first exceeds a number below the total where it rises. A sequential scan rises at
    # no weight of 0, but the parallel scans of GPUs round each index on its own and may.
    stray = weights.gather(1, at) == 0
    if stray.any():
        at = torch.where(stray, weights.argmax(1, keepdim=True), at)
    return at[:, 0], total[:, 0]


def _likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # `max` gives `argmax`'s answer with its value, and is four times faster on a CPU.
    values, tokens = logits.max(1)
    return tokens, values
