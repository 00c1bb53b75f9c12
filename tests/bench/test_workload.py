"""Lengths and arrivals like those of the paper."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageloom.bench.workload import (
    ALPACA,
    MAX_MODEL_LEN,
    SHAREGPT,
    STRATA,
    Lengths,
    RecordedLengths,
    poisson_arrivals,
)

PUBLISHED = [(SHAREGPT, 161.31, 337.99), (ALPACA, 19.31, 58.45)]


@pytest.mark.parametrize(("workload", "prompt", "output"), PUBLISHED, ids=lambda value: str(value))
@pytest.mark.parametrize(("count", "tolerance"), [(STRATA, 0.06), (100 * STRATA, 0.01)])
def test_means_are_the_published_ones(workload, prompt, output, count, tolerance):
    lengths = workload.lengths(count, Random(0))
    assert fmean(length.prompt_tokens for length in lengths) == pytest.approx(prompt, rel=tolerance)
    assert fmean(length.output_tokens for length in lengths) == pytest.approx(output, rel=tolerance)


def test_spread_of_sharegpt_outputs_is_what_orca_max_reserves_in_the_paper():
    outputs = [length.output_tokens for length in SHAREGPT.lengths(100 * STRATA, Random(0))]
    awaited = fmean(o * o for o in outputs) / fmean(outputs) / 2  # per running request
    assert 7 * awaited / 15728 == pytest.approx(0.133, abs=0.002)


def test_spread_of_alpaca_is_that_of_its_file():
    lengths = ALPACA.lengths(100 * STRATA, Random(0))
    outputs = [length.output_tokens for length in lengths]
    prompts = [length.prompt_tokens for length in lengths]
    assert pstdev(outputs) / fmean(outputs) == pytest.approx(275.03 / 270.31, abs=0.03)
    characters = (21.19**2 + 57.51**2) ** 0.5 / (59.78 + 22.91)
    assert pstdev(prompts) / fmean(prompts) == pytest.approx(characters, abs=0.03)


@given(st.sampled_from([SHAREGPT, ALPACA]), st.integers(), st.integers(0, 3 * STRATA))
def test_every_request_fits_the_model(workload, seed, count):
    lengths = workload.lengths(count, Random(seed))
    assert len(lengths) == count
    assert all(min(length) >= 1 and sum(length) <= MAX_MODEL_LEN for length in lengths)


@given(st.integers())
def test_a_short_run_has_short_and_long_requests_in_every_combination(seed):
    lengths = SHAREGPT.lengths(STRATA, Random(seed))
    prompts = sorted(length.prompt_tokens for length in lengths)
    with_long_prompts = [o for p, o in lengths if p >= prompts[-8]]
    outputs = sorted(length.output_tokens for length in lengths)
    # Of the eighth with the longest prompts, one output is in each eighth of the outputs. (Equal
    # lengths may put one more into the first.)
    for low, high in zip(outputs[::8], [*outputs[8::8], MAX_MODEL_LEN], strict=True):
        assert any(low <= output <= high for output in with_long_prompts)


def test_arrivals_are_a_poisson_process_and_repeatable():
    arrivals = poisson_arrivals(ALPACA, rate=30, seconds=200, seed=1)
    times = [arrival.time for arrival in arrivals]
    gaps = [after - before for before, after in pairwise(times)]
    assert times == sorted(times)
    assert times[-1] < 200
    assert len(times) == pytest.approx(6000, abs=4 * 6000**0.5)
    assert pstdev(gaps) == pytest.approx(fmean(gaps), rel=0.05)  # as of an exponential
    assert arrivals == poisson_arrivals(ALPACA, rate=30, seconds=200, seed=1)
    assert arrivals != poisson_arrivals(ALPACA, rate=30, seconds=200, seed=2)


def test_a_slower_rate_brings_the_same_workload():
    """Systems are compared on the same requests, so they may not depend on anything else."""
    fast = poisson_arrivals(SHAREGPT, rate=8, seconds=10, seed=0)
    slow = poisson_arrivals(SHAREGPT, rate=2, seconds=40, seed=0)
    assert [arrival.lengths for arrival in fast] == [arrival.lengths for arrival in slow]


def test_recorded_lengths_are_drawn_as_they_are():
    recorded = RecordedLengths("ShareGPT", [Lengths(1, 2), Lengths(30, 4)])
    assert set(recorded.lengths(100, Random(0))) == {Lengths(1, 2), Lengths(30, 4)}
