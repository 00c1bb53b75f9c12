"""How much samples and beams share, and the made-up probabilities that beams live by."""

from __future__ import annotations

from math import exp
from pathlib import Path
from random import Random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from pageloom.bench.memory.settings import settings_from
from pageloom.bench.memory.sharing import concentration, likeliest, measure_saving
from pageloom.bench.workload import ALPACA, Lengths
from pageloom.config import load_config

CONFIG = Path(__file__).parents[3] / "configs" / "bench" / "memory.yaml"


@pytest.fixture(scope="module")
def settings():
    return settings_from(load_config(CONFIG))


@hypothesis_settings(max_examples=40)
@given(
    st.lists(st.builds(Lengths, st.integers(1, 70), st.integers(2, 70)), min_size=1, max_size=6),
    st.integers(2, 6),
)
def test_samples_share_the_full_blocks_of_the_prompt(lengths, width):
    """Counted after each step, once the prompt is computed: later blocks are copied or new."""
    used = unshared = 0
    for prompt, output in lengths:
        used += -(-prompt // 16)  # all of the prompt's blocks, just forked
        unshared += width * -(-prompt // 16)
        for computed in range(prompt + 1, prompt + output - 1):
            blocks = -(-computed // 16)
            used += prompt // 16 + width * (blocks - prompt // 16)
            unshared += width * blocks
    saving = measure_saving(settings_of(16), lengths, "parallel sampling", width)
    assert saving.of_blocks == pytest.approx(1 - used / unshared)


def settings_of(block_size):
    return settings_from(load_config(CONFIG, [f"kv_cache.block_size={block_size}"]))


def test_savings_do_not_depend_on_how_many_run_at_a_time(settings):
    lengths = ALPACA.lengths(12, Random(0))
    alone = settings_from(load_config(CONFIG, ["scheduler.max_num_seqs=4"]))
    assert measure_saving(settings, lengths, "parallel sampling", 4) == pytest.approx(
        measure_saving(alone, lengths, "parallel sampling", 4)
    )


@pytest.mark.parametrize("method", ["parallel sampling", "beam search"])
def test_outputs_of_one_token_share_nothing(settings, method):
    assert measure_saving(settings, [Lengths(20, 1)] * 2, method, 2) == (0, 0)


def test_beams_share_more_than_samples_and_are_repeatable(settings):
    lengths = ALPACA.lengths(16, Random(0))
    for width in (2, 4):
        samples = measure_saving(settings, lengths, "parallel sampling", width)
        beams = measure_saving(settings, lengths, "beam search", width)
        assert samples.of_blocks < beams.of_blocks < 1 - 1 / width
        assert beams == measure_saving(settings, lengths, "beam search", width)


def test_beams_of_text_that_repeats_itself_share_less(settings):
    lengths = [Lengths(20, 120)] * 3
    early, late = (
        measure_saving(settings, lengths, "beam search", 4, repeats_after=tokens).of_blocks
        for tokens in (10, 1000)
    )
    assert early < late - 0.1


@given(st.integers(), st.integers(1, 12), st.floats(0.001, 20))
def test_candidates_are_probabilities_the_likeliest_first(seed, count, flatness):
    logprobs = likeliest(Random(seed), count, flatness)
    assert len(logprobs) == count
    assert logprobs == sorted(logprobs, reverse=True)
    assert sum(exp(logprob) for logprob in logprobs) <= 1 + 1e-9


@pytest.mark.parametrize(("flatness", "published"), [(1.0, 0.624), (0.5, 0.758)])
def test_the_likeliest_has_the_mean_probability_of_its_distribution(flatness, published):
    """0.6243... is the Golomb-Dickman constant, 0.7578... its like for 1/2."""
    random = Random(0)
    first = fmean(exp(likeliest(random, 2, flatness)[0]) for _ in range(20000))
    assert first == pytest.approx(published, abs=0.01)


@pytest.mark.parametrize(
    ("position", "measured"),
    [(30, 0.59), (90, 0.61), (150, 0.63), (210, 0.77), (270, 0.84), (320, 0.88)],
)
def test_certainty_grows_along_a_text_as_it_did_in_a_model(position, measured):
    """Against what SmolLM2-135M-Instruct did with six beams (docs/memory.md)."""
    random = Random(0)
    flatness = concentration(position, repeats_after=180)
    first = fmean(exp(likeliest(random, 1, flatness)[0]) for _ in range(5000))
    assert first == pytest.approx(measured, abs=0.07)
