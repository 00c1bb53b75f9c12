"""Beam search over the outputs of one request: which beams live on, and which output is best."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from operator import attrgetter, itemgetter
from typing import Literal

EarlyStopping = bool | Literal["never"]


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished output. ``score`` is the sum of its tokens' log-probabilities, divided by their
    number to the power of ``length_penalty``."""

    token_ids: list[int]  # with the token that ended it
    score: float
    finish_reason: Literal["stop", "length"]
    stop_reason: int | None  # the stop token that ended it; None for EOS


class BeamSearch:
    """Scores of one request's beams; the beams themselves, and their KV, belong to the caller.

    Gives the outputs and the scores of ``GenerationMixin._beam_search`` in transformers 5.24
    (generation/utils.py), which ``num_beams`` selects there. In each step, the continuations of
    all live beams are ranked by the sum of their log-probabilities:

    - Those that end, at a stop token or at ``max_tokens``, are finished if they are among the
      first ``width``. The ``width`` best finished ones by score are kept.
    - The first ``width`` of those that do not end live on.

    The search is done at ``max_tokens``; or when ``width`` outputs are finished and either
    ``early_stopping`` is True or the best live beam could not beat the worst finished one, were
    its sum to stay as it is. It is scored by its present length for that, or by ``max_tokens``
    if ``early_stopping`` is "never" and longer outputs score higher (``length_penalty`` > 0).

    Where sums are equal, the earlier beam comes first, then the order of its candidates. (In
    transformers it is whatever ``torch.topk`` does.)
    """

    def __init__(
        self,
        width: int,
        *,
        length_penalty: float,
        early_stopping: EarlyStopping,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_ids: Collection[int] = (),
        stop_token_ids: Collection[int] = (),
        num_return: int = 1,
    ) -> None:
        """Tokens of either kind end an output; they only differ in `Hypothesis.stop_reason`.
        Before ``min_tokens`` they are passed over, as if their probability were 0."""
        self.width = width
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.stop_token_ids = frozenset(stop_token_ids)
        self.end_token_ids = self.stop_token_ids | frozenset(eos_token_ids)
        self.num_return = num_return
        self.num_candidates = width + len(self.end_token_ids)
        """Likeliest tokens that `step` needs of each beam: ``width`` of them may come from one
        beam, besides all that end. (The ``max(2, 1 + n_eos) * num_beams`` of transformers are of
        all beams together, and contain what is picked from these.)"""
        self.scores = [0.0]  # of the live beams, in their order: sums of log-probabilities
        self.done = False
        self._finished: list[Hypothesis] = []  # at most `width`, best first

    def step(
        self,
        beams: Sequence[Sequence[int]],
        candidates: Sequence[Sequence[tuple[int, float]]],
    ) -> list[tuple[int, int]]:
        """Extend every live beam by one token.

        ``beams`` are the output token ids of the live beams, all of one length; at first there is
        one, and it is empty. ``candidates`` are each beam's `num_candidates` likeliest tokens
        (all, if the vocabulary has not as many) with their log-probabilities, likeliest first.

        Returns the next live beams, best first, as (index of the beam it extends, token id):
        ``width`` of them, fewer only if there are not as many continuations, and none when the
        search is done.
        """
        length = len(beams[0]) + 1
        live: list[tuple[float, int, int]] = []
        for rank, (score, parent, token) in enumerate(self._ranked(length, candidates)):
            if length < self.max_tokens and token not in self.end_token_ids:
                live.append((score, parent, token))
            elif rank < self.width:
                self._finish([*beams[parent], token], self._normalized(score, length))
            if len(live) == self.width:
                break
        self.scores = [score for score, _, _ in live]
        self.done = not live or not self._may_improve(length)
        return [] if self.done else [(parent, token) for _, parent, token in live]

    def results(self) -> list[Hypothesis]:
        """The best finished outputs, best first: ``num_return`` of them when the search is done,
        before that as many of them as there are."""
        return self._finished[: self.num_return]

    def _ranked(
        self, length: int, candidates: Sequence[Sequence[tuple[int, float]]]
    ) -> Iterator[tuple[float, int, int]]:
        """(sum of log-probabilities, beam, token) of all continuations, best first."""
        banned = self.end_token_ids if length <= self.min_tokens else frozenset()
        rows = [
            [(score + logprob, parent, token) for token, logprob in row if token not in banned]
            for parent, (score, row) in enumerate(zip(self.scores, candidates, strict=True))
        ]
        return merge(*rows, key=itemgetter(0), reverse=True)

    def _finish(self, token_ids: list[int], score: float) -> None:
        last = token_ids[-1]
        hypothesis = Hypothesis(
            token_ids,
            score,
            finish_reason="stop" if last in self.end_token_ids else "length",
            stop_reason=last if last in self.stop_token_ids else None,
        )
        self._finished.append(hypothesis)
        self._finished.sort(key=attrgetter("score"), reverse=True)  # stable
        del self._finished[self.width :]

    def _may_improve(self, length: int) -> bool:
        """Whether it is worth going on after outputs of ``length`` tokens."""
        if len(self._finished) < self.width:
            return True
        if self.early_stopping is True:
            return False
        if self.early_stopping == "never" and self.length_penalty > 0:
            length = self.max_tokens
        return self._normalized(self.scores[0], length) > self._finished[-1].score

    def _normalized(self, total: float, length: int) -> float:
        return total / float(length**self.length_penalty)
