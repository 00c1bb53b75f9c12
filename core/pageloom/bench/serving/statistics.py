"""Ratios of paired measurements, and how far they can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
# The range of n values holds the median of their distribution with probability 1 - 2^(1 - n),
# however it is shaped: 0.97 for 6 values, 0.94 for 5. With fewer than 6 rounds nothing that is
# computed from them can be a 95 percent interval of the median round.
MIN_ROUNDS = 6


@dataclass(frozen=True, slots=True)
class Ratio:
    """A config's value divided by the baseline's in the same round: the median over rounds."""

    value: float
    low: float
    high: float
    rounds: int
    confidence: float | None
    """Of the interval from `low` to `high`; None if there are too few rounds to have one, and the
    two are just the least and the greatest ratio of a round."""


def median_of_percentiles(rounds: Sequence[Sequence[float]], percentile: float) -> float:
    """The percentile of each round's values, then the median over rounds."""
    return float(np.median(np.percentile(np.asarray(rounds), percentile, axis=1)))


def paired_ratio(
    values: Sequence[Sequence[float]],
    baseline: Sequence[Sequence[float]],
    percentile: float = 50,
    seed: int = 0,
) -> Ratio | None:
    """The ratio of a percentile, round by round: ``[rounds][requests]`` on both sides, paired.

    A number that a round has only one of, such as its throughput, is a round of one request.
    Returns None if a value is 0, which has no ratio.

    The interval is the percentile bootstrap's, over rounds and over requests (the same draw for
    both sides and all rounds) at once: requests of a round share what the machine did in it, so
    drawing requests alone would promise too much (Owen 2007, "The pigeonhole bootstrap", Annals of
    Applied Statistics 1(2)). It errs towards being wide.
    """
    mine, theirs = np.asarray(values, dtype=float), np.asarray(baseline, dtype=float)
    if mine.shape != theirs.shape:
        raise ValueError(f"the two sides are not paired: {mine.shape} and {theirs.shape}")
    if not (mine > 0).all() or not (theirs > 0).all():
        return None
    # In logarithms, a ratio and its inverse are treated alike.
    per_round = _log_ratios(mine, theirs, percentile)
    num_rounds, num_requests = mine.shape
    if num_rounds < MIN_ROUNDS:
        low, high, confidence = per_round.min(), per_round.max(), None
    else:
        draw = np.random.default_rng(seed)
        medians = np.empty(RESAMPLES)
        for i in range(RESAMPLES):
            rounds = draw.integers(num_rounds, size=(num_rounds, 1))
            requests = draw.integers(num_requests, size=num_requests)
            drawn = _log_ratios(mine[rounds, requests], theirs[rounds, requests], percentile)
            medians[i] = np.median(drawn)
        tail = (1 - CONFIDENCE) / 2
        low, high = np.quantile(medians, [tail, 1 - tail])
        confidence = CONFIDENCE
    return Ratio(
        float(np.exp(np.median(per_round))),
        float(np.exp(low)),
        float(np.exp(high)),
        num_rounds,
        confidence,
    )


def _log_ratios(
    values: NDArray[np.float64], baseline: NDArray[np.float64], percentile: float
) -> NDArray[np.float64]:
    """One per round."""
    tops, bottoms = np.percentile([values, baseline], percentile, axis=2)
    ratios: NDArray[np.float64] = np.log(tops / bottoms)
    return ratios
