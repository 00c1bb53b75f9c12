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
    """One side's value divided by the baseline's: the median over rounds."""

    value: float
    low: float
    high: float
    rounds: int
    confidence: float | None
    """Of the interval from `low` to `high`; None if there are too few rounds to have one, and the
    two are just the least and the greatest ratio of a round."""


def show_ratio(ratio: Ratio | None) -> str:
    """With its interval in brackets, or its range in parentheses."""
    if ratio is None:
        return ""
    if ratio.rounds == 1:
        return f"{ratio.value:.2f}"
    low, high = f"{ratio.low:.2f}", f"{ratio.high:.2f}"
    spread = f"({low} to {high})" if ratio.confidence is None else f"[{low}, {high}]"
    return f"{ratio.value:.2f} {spread}"


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


def unpaired_ratio(values: Sequence[float], baseline: Sequence[float], seed: int = 0) -> Ratio:
    """The ratio of the medians of two runs, whose rounds have nothing to do with each other.

    The interval is the percentile bootstrap's, over the rounds of each. It knows only what varied
    within the runs. All values must be above 0, and there must be `MIN_ROUNDS` of each, or else
    `ValueError` is raised.
    """
    sides = [np.log(np.asarray(side, dtype=float)) for side in (values, baseline)]
    fewest = min(map(len, sides))
    if fewest < MIN_ROUNDS:
        raise ValueError(f"{fewest} rounds are too few: {MIN_ROUNDS} are needed")
    draw = np.random.default_rng(seed)
    mine, theirs = (
        np.median(side[draw.integers(len(side), size=(RESAMPLES, len(side)))], axis=1)
        for side in sides
    )
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(mine - theirs, [tail, 1 - tail])
    value = np.median(sides[0]) - np.median(sides[1])
    return Ratio(float(np.exp(value)), float(np.exp(low)), float(np.exp(high)), fewest, CONFIDENCE)


def _log_ratios(
    values: NDArray[np.float64], baseline: NDArray[np.float64], percentile: float
) -> NDArray[np.float64]:
    """One per round."""
    tops, bottoms = np.percentile([values, baseline], percentile, axis=2)
    ratios: NDArray[np.float64] = np.log(tops / bottoms)
    return ratios
