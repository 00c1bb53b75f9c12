"""Ratios are paired by round and request, and their intervals hold what they promise."""

from __future__ import annotations

import numpy as np
import pytest

from pageloom.bench import statistics
from pageloom.bench.statistics import MIN_ROUNDS, median_of_percentiles, paired_ratio


def noisy(seed, rounds=MIN_ROUNDS, requests=40, spread=0.1):
    """Two sides, the first twice as slow; the machine's speed drifts by a factor of 3, requests
    differ by a factor of 20, and what is left is noise of ``spread`` per side and round."""
    draw = np.random.default_rng(seed)
    shared = np.linspace(0, np.log(3), rounds)[:, None] + np.linspace(0, np.log(20), requests)
    sides = shared + draw.normal(0, spread, (2, rounds, 1)) + draw.normal(0, 0.02, (2, 1, requests))
    return 2 * np.exp(sides[0]), np.exp(sides[1])


def test_pairing_takes_out_what_both_sides_share():
    slow, fast = noisy(0, spread=0)
    for percentile in (50, 90, 99):
        ratio = paired_ratio(slow, fast, percentile)
        assert ratio.value == pytest.approx(2, rel=0.05)
        assert 1.8 < ratio.low < 2 * 1.02
        assert 2 * 0.98 < ratio.high < 2.2


def test_the_interval_covers_the_truth_as_often_as_it_says(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 300)
    covered = 0
    for seed in range(80):
        ratio = paired_ratio(*noisy(seed, requests=5))
        covered += ratio.low <= 2 <= ratio.high
    assert covered >= 68  # 0.95 is 76 of 80; fewer than 68 has a probability below 0.001


def test_the_noise_of_rounds_widens_the_interval_however_many_requests_there_are():
    quiet, loud = paired_ratio(*noisy(3, spread=0.01)), paired_ratio(*noisy(3, spread=0.3))
    assert loud.high / loud.low > 1.2 > quiet.high / quiet.low


def test_a_ratio_and_its_inverse_agree():
    slow, fast = noisy(5)
    one, other = paired_ratio(slow, fast, 90), paired_ratio(fast, slow, 90)
    assert one.value == pytest.approx(1 / other.value)
    assert one.low == pytest.approx(1 / other.high)


def test_few_rounds_give_their_range_and_no_interval():
    slow, fast = noisy(1, rounds=MIN_ROUNDS - 1, requests=1)
    ratio = paired_ratio(slow, fast)
    per_round = (slow / fast)[:, 0]
    assert ratio.confidence is None
    assert (ratio.low, ratio.high) == pytest.approx((per_round.min(), per_round.max()))
    assert ratio.value == pytest.approx(np.median(per_round))
    assert paired_ratio(*noisy(1)).confidence == 0.95


def test_what_has_no_ratio_or_no_partner():
    assert paired_ratio([[0.0]], [[1.0]]) is None
    with pytest.raises(ValueError, match="not paired"):
        paired_ratio([[1.0, 2.0]], [[1.0]])


def test_a_value_is_the_median_round():
    assert median_of_percentiles([[1, 2, 3], [10, 20, 30], [100, 200, 300]], 50) == 20
    assert median_of_percentiles([[0, 10], [0, 20], [0, 30]], 90) == pytest.approx(18)
