"""The baselines and the control plane as systems that serve, against a count of each request."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom.bench.memory.contiguous import (
    ContiguousSystem,
    reserve_max,
    reserve_oracle,
    reserve_power_of_two,
)
from pageloom.bench.memory.paged import PagedSystem, check_fit
from pageloom.bench.memory.serve import serve
from pageloom.bench.memory.served import KV_SLOTS, LLAMA_13B, OPT_13B, StepTime
from pageloom.bench.memory.settings import settings_from
from pageloom.bench.workload import (
    ALPACA,
    MAX_MODEL_LEN,
    SHAREGPT,
    Arrival,
    Lengths,
    poisson_arrivals,
)
from pageloom.config import load_config
from pageloom.errors import PageloomError

CONFIG = Path(__file__).parents[3] / "configs" / "bench" / "memory.yaml"
SMALL = st.builds(Lengths, st.integers(1, 40), st.integers(1, 30))
LARGE = st.integers(1, 1000).flatmap(
    lambda prompt: st.builds(Lengths, st.just(prompt), st.integers(1, MAX_MODEL_LEN - prompt))
)


def paper_settings(*overrides):
    return settings_from(load_config(CONFIG, overrides))


def run(system, lengths):
    """Every step of ``system`` with what its requests must hold, as (iteration, running), where
    ``running`` has the tokens and the lengths of each."""
    waiting, running, steps = deque(lengths), [], []
    for length in lengths:
        system.add(Arrival(0.0, length))
    while system.busy:
        iteration = system.step(float(len(steps)))
        running = [[tokens + 1, length] for tokens, length in running if tokens + 1 < sum(length)]
        for _ in range(iteration.requests - len(running)):
            length = waiting.popleft()  # in order of arrival
            running.append([length.prompt_tokens, length])
        steps.append((iteration, [tuple(one) for one in running]))
    assert not waiting
    return steps


@settings(max_examples=40)
@given(st.lists(LARGE, min_size=1, max_size=12), st.sampled_from([2048, 3000, 5000]))
@pytest.mark.parametrize("reserve", [reserve_max, reserve_power_of_two, reserve_oracle])
def test_contiguous_regions_are_accounted_for(reserve, lengths, slots):
    for iteration, running in run(ContiguousSystem(slots, reserve, 256), lengths):
        usage = iteration.usage
        assert sum(usage) == slots
        assert min(usage) >= 0
        assert usage.token_states == sum(tokens for tokens, _ in running)
        assert usage.reserved == sum(sum(length) - tokens for tokens, length in running)
        assert usage.internal == sum(reserve(length) - sum(length) for _, length in running)
        regions = [1 << (reserve(length) - 1).bit_length() for _, length in running]
        assert usage.free == slots - sum(regions)
        prompts = [length.prompt_tokens for _, length in running][-iteration.prefills :]
        decodes = iteration.requests - iteration.prefills
        assert iteration.tokens == decodes + sum(prompts if iteration.prefills else [])


def test_reservations_are_the_papers():
    assert reserve_max(Lengths(10, 25)) == 2048
    assert reserve_power_of_two(Lengths(10, 25)) == 10 + 32  # the example of section 6.1
    assert reserve_power_of_two(Lengths(10, 32)) == 10 + 32
    assert reserve_power_of_two(Lengths(1000, 1048)) == 2048
    assert reserve_oracle(Lengths(10, 25)) == 35


def test_seats_limit_the_baselines_too():
    steps = run(ContiguousSystem(KV_SLOTS, reserve_oracle, 3), [Lengths(4, 4)] * 10)
    assert max(iteration.requests for iteration, _ in steps) == 3


@settings(max_examples=40)
@given(st.lists(SMALL, min_size=1, max_size=20), st.sampled_from([1, 7, 16]))
def test_paged_memory_is_accounted_for(lengths, block_size):
    system = PagedSystem(paper_settings(f"kv_cache.block_size={block_size}"))
    for iteration, running in run(system, lengths):
        usage = iteration.usage
        blocks = sum(-(-tokens // block_size) for tokens, _ in running)
        assert usage.token_states == sum(tokens for tokens, _ in running)
        assert usage.internal == blocks * block_size - usage.token_states
        assert usage.free == KV_SLOTS - blocks * block_size
        assert (usage.reserved, usage.rounding) == (0, 0)


def test_blocks_of_the_models_length_are_reservations_to_the_maximum():
    """Two programs, one of them the real planner, must then do the same in every step."""
    overrides = [f"kv_cache.block_size={MAX_MODEL_LEN}", "scheduler.max_num_batched_tokens=99999"]
    arrivals = poisson_arrivals(SHAREGPT, rate=2, seconds=60, seed=3)
    paged, contiguous = (
        serve(system, arrivals, StepTime(), start=10, stop=60)
        for system in (
            PagedSystem(paper_settings(*overrides)),
            ContiguousSystem(KV_SLOTS, reserve_max, 256),
        )
    )
    assert paged.shares["token_states"] == contiguous.shares["token_states"]
    assert paged.shares["free"] == contiguous.shares["free"]
    assert paged.requests == contiguous.requests
    assert contiguous.requests.mean == pytest.approx(7.0, abs=0.05)


def test_smaller_blocks_waste_less_and_hold_more():
    arrivals = poisson_arrivals(ALPACA, rate=200, seconds=4, seed=0)
    measured = [
        serve(
            PagedSystem(paper_settings(f"kv_cache.block_size={size}")),
            arrivals,
            StepTime(),
            start=2,
            stop=4,
        )
        for size in (16, 64, 256)
    ]
    waste = [one.shares["internal"].mean for one in measured]
    requests = [one.requests.mean for one in measured]
    assert waste == sorted(waste)
    assert requests == sorted(requests, reverse=True)


@pytest.mark.parametrize(
    "make",
    [
        lambda: PagedSystem(paper_settings()),
        lambda: ContiguousSystem(KV_SLOTS, reserve_oracle, 256),
    ],
)
def test_the_same_arrivals_are_served_the_same_way(make):
    arrivals = poisson_arrivals(SHAREGPT, rate=2, seconds=30, seed=5)
    once, again = (serve(make(), arrivals, StepTime(), start=5, stop=30) for _ in range(2))
    assert once == again


def test_idle_time_counts_as_free_memory():
    arrivals = [Arrival(5.0, Lengths(16, 1)), Arrival(15.0, Lengths(16, 1))]
    measured = serve(PagedSystem(paper_settings()), arrivals, StepTime(), start=0, stop=20)
    assert measured.shares["free"].mean > 0.99
    assert measured.requests.mean == 1
    assert measured.waiting == 0


def test_the_models_of_the_paper_leave_room_for_15700_tokens():
    assert KV_SLOTS == 15728  # "15.7K" in table 1
    for model in (OPT_13B, LLAMA_13B):
        assert model.kv_bytes_per_token == 800 * 1024  # section 3
        assert model.weight_bytes == 26e9


def test_a_step_takes_as_long_as_littles_law_says_of_the_paper():
    """132.44 requests of Alpaca at 30 requests/s, each of 58.45 steps."""
    prompts = 30 * 0.0755 * 19.31  # tokens that arrive during a step
    seconds = StepTime().seconds(132, 132 + round(prompts), 132 * 78)
    assert seconds == pytest.approx(132.44 / (30 * 58.45), rel=0.01)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheduler.max_num_seqs=5", "has 6 branches, .* but max_num_seqs is 5"),
        ("kv_cache.block_size=4000", "only 3 such blocks, and 6 beams .* may need 6; lower it"),
        ("kv_cache.block_size=20000", "only 0 such blocks"),
    ],
)
def test_configurations_that_cannot_serve_the_paper_are_refused(override, message):
    with pytest.raises(PageloomError, match=message):
        check_fit(paper_settings(override))


def test_prompts_need_room_in_a_step_unless_they_are_split():
    small = ["scheduler.max_num_batched_tokens=512", "model.max_model_len=null"]
    with pytest.raises(PageloomError, match="2047 tokens in one step, but max_num_batched_tokens"):
        check_fit(paper_settings(*small))
    check_fit(paper_settings(*small, "scheduler.enable_chunked_prefill=true"))
