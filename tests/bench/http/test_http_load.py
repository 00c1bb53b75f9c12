"""What is asked, and when, is of the distributions that it is said to be of."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import mean, stdev

import pytest

from pageloom.bench.http.load import with_arrivals, with_lengths, with_prefix_share
from pageloom.bench.serving.trace import draw_token_ids, random_trace, with_poisson_arrivals
from pageloom.bench.workload import ALPACA, SHAREGPT
from pageloom.errors import PageloomError


@pytest.mark.parametrize(("burstiness", "variation"), [(0.25, 2.0), (1.0, 1.0), (100.0, 0.1)])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_the_shape(burstiness, variation):
    trace = with_arrivals(random_trace(20_000), 50.0, burstiness)
    times = [0.0, *(request.arrival for request in trace)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert min(gaps) >= 0
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert stdev(gaps) / mean(gaps) == pytest.approx(variation, rel=0.05)


def test_without_bursts_it_is_the_poisson_process_of_the_other_benchmarks():
    trace = random_trace(50)
    assert with_arrivals(trace, 3.0, 1.0, seed=7) == with_poisson_arrivals(trace, 3.0, seed=7)


@pytest.mark.parametrize(
    ("rate", "burstiness", "message"),
    [(0.0, 1.0, "the rate is 0.0"), (-1.0, 2.0, "the rate is -1.0"),
     (1.0, 0.0, "the burstiness is 0.0"), (1.0, float("nan"), "the burstiness is nan")],
)  # fmt: skip
def test_arrivals_that_cannot_be(rate, burstiness, message):
    with pytest.raises(PageloomError, match=message):
        with_arrivals(random_trace(2), rate, burstiness)


@pytest.mark.parametrize("source", [SHAREGPT, ALPACA], ids=lambda source: source.name)
def test_lengths_are_those_of_the_dataset(source):
    trace = with_lengths(random_trace(128), source, seed=3)
    lengths = source.lengths(128, Random(f"3 {source.name} lengths"))
    assert [(r.random_prompt.tokens, r.output_tokens) for r in trace] == lengths


def test_a_prefix_is_part_of_a_prompt_of_that_length():
    trace = with_lengths(random_trace(64, prefix_tokens=10), ALPACA)
    lengths = [one.prompt_tokens for one in ALPACA.lengths(64, Random("0 Alpaca lengths"))]
    drawn = draw_token_ids(trace, 1000)
    assert [len(request.prompt) for request in drawn] == [max(n, 11) for n in lengths]
    assert len({request.prompt[:10] for request in drawn}) == 1


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_share_of_the_prompts_begins_alike(share):
    whole = random_trace(100, prompt_tokens=(5, 9), prefix_tokens=20, prefix_groups=2)
    drawn = draw_token_ids(with_prefix_share(whole, share), 5000)
    prefixes = {request.prompt[:20] for request in draw_token_ids(whole, 5000)}
    assert len(prefixes) == 2
    assert sum(request.prompt[:20] in prefixes for request in drawn) == 100 * share
    lengths = [len(request.prompt) for request in draw_token_ids(whole, 5000)]
    assert [len(request.prompt) for request in drawn] == lengths
