"""What a sampling step costs, and what it refuses."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from pageloom.runner.sampler import Sampler, SampleRow
from pageloom.scheduling.params import SamplingParams

VOCAB = 24


def make_row(output=(), prompt=(), eos=(), **params):
    return SampleRow(SamplingParams(**params), list(prompt), list(output), eos)


def random_logits(num_rows, vocab_size=VOCAB):
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0))


# -- cost ---------------------------------------------------------------------------------------


def forbid(monkeypatch, *functions):
    def refuse(*args, **kwargs):
        raise AssertionError("called a function that this batch does not need")

    for owner, name in functions:
        monkeypatch.setattr(owner, name, refuse)


SORTS = [(torch, "sort"), (torch.Tensor, "sort"), (torch, "argsort"), (np, "sort")]
SELECTIONS = [(torch, "topk"), (torch.Tensor, "topk")]


def test_a_batch_in_which_nobody_needs_a_sort_does_not_sort(monkeypatch):
    forbid(monkeypatch, *SORTS, *SELECTIONS)
    fields = [
        {"temperature": 0},
        {"temperature": 0.7, "seed": 1},
        {"min_p": 0.2, "logprobs": 0},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.1, "prompt": [1], "output": [2, 2]},
        {"logit_bias": {1: 1.0}, "min_tokens": 5, "eos": [0]},
        {"top_k": VOCAB},
    ]
    rows = [make_row(**f) for f in fields]
    assert len(Sampler().sample(random_logits(6), rows).token_ids) == 6


def test_top_k_selects_but_does_not_sort(monkeypatch):
    forbid(monkeypatch, *SORTS)
    rows = [make_row(top_k=3, top_p=0.5), make_row(top_k=9), make_row(temperature=0)]
    assert len(Sampler().sample(random_logits(3, vocab_size=1000), rows).token_ids) == 3


def test_the_guard_against_sorting_does_catch_a_sort(monkeypatch):
    forbid(monkeypatch, *SORTS)
    with pytest.raises(AssertionError, match="does not need"):
        Sampler().sample(random_logits(1, vocab_size=1000), [make_row(top_p=0.5)])


def test_a_greedy_batch_takes_no_softmax_and_no_copy(monkeypatch):
    forbid(monkeypatch, (torch.Tensor, "softmax"), (torch.Tensor, "cumsum"), *SORTS, *SELECTIONS)
    logits = random_logits(3)
    tokens = Sampler().sample(logits, [make_row(temperature=0)] * 3).token_ids
    assert tokens == logits.argmax(1).tolist()


def test_results_come_from_the_device_in_one_transfer(monkeypatch):
    calls, transfer = Counter(), torch.Tensor.cpu

    def count(self):
        calls["cpu"] += 1
        return transfer(self)

    monkeypatch.setattr(torch.Tensor, "cpu", count)
    rows = [make_row(logprobs=4), make_row(temperature=0), make_row(top_p=0.5, logprobs=0)]
    Sampler().sample(random_logits(3), rows)
    assert calls["cpu"] == 1


# -- what cannot be sampled ---------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2}, {"top_p": 0.5}])
def test_rows_with_nan_or_infinite_logits_are_named_and_disturb_no_others(value, fields):
    logits, rows = random_logits(4), [make_row(**fields, logprobs=2, seed=1)] * 4
    expected = Sampler().sample(logits.clone(), rows)
    logits[1, 7] = logits[3, 0] = value
    output = Sampler().sample(logits, rows)
    assert output.invalid == [1, 3]
    assert [output.token_ids[i] for i in (1, 3)] == [0, 0]
    assert [output.logprobs[i] for i in (1, 3)] == [None, None]
    for i in (0, 2):
        assert output.token_ids[i] == expected.token_ids[i]
        assert output.logprobs[i] == expected.logprobs[i]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2, "min_p": 0.5}])
def test_a_row_without_any_possible_token_is_named(fields):
    logits = random_logits(2)
    logits[0] = -math.inf
    rows = [make_row(**fields), make_row(temperature=0)]
    assert Sampler().sample(logits, rows).invalid == [0]


@pytest.mark.parametrize("fields", [{"temperature": 0}, {}, {"top_k": 2, "top_p": 0.5}])
def test_a_row_whose_every_token_is_banned_is_named(fields):
    banned = make_row(**fields, min_tokens=1, stop_token_ids=list(range(1, VOCAB)), eos=[0])
    output = Sampler().sample(random_logits(2), [make_row(), banned])
    assert output.invalid == [1]


def test_end_of_sequence_tokens_outside_the_vocabulary_ban_nothing():
    logits = torch.zeros(1, VOCAB)
    logits[0, [1, VOCAB - 1]] = torch.tensor([1.0, 2.0])
    row = make_row(temperature=0, min_tokens=1, eos=[VOCAB, -1, -VOCAB, 10**9])
    assert Sampler().sample(logits.clone(), [row]).token_ids == [VOCAB - 1]
    row = make_row(temperature=0, min_tokens=1, eos=[VOCAB, VOCAB - 1])
    assert Sampler().sample(logits, [row]).token_ids == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("num_top", [0, 3])
def test_prompt_logprobs_of_rows_that_are_no_distribution_are_nan(value, num_top):
    logits = random_logits(4)
    logits[1, 0] = value
    logits[2] = -math.inf
    scored = Sampler().prompt_logprobs(logits, torch.tensor([1, 2, 3, 4]), num_top)
    assert [math.isnan(score.logprob) for score in scored] == [False, True, True, False]


def test_a_single_possible_token_is_drawn():
    logits = torch.full((3, VOCAB), -math.inf)
    logits[:, 5] = 0.0
    rows = [make_row(temperature=0), make_row(), make_row(top_p=0.1, min_p=0.3)]
    assert Sampler().sample(logits, rows).token_ids == [5, 5, 5]


def test_temperatures_at_the_limits_stay_in_range():
    logits = 40 * random_logits(2)
    best = logits.argmax(1).tolist()
    assert Sampler().sample(logits, [make_row(temperature=1e-4)] * 2).token_ids == best


def test_ties_of_greedy_rows_go_to_the_lowest_token_id():
    logits = torch.zeros(2, 50_000)
    logits[0, [777, 40_000]] = 1.0
    assert Sampler().sample(logits, [make_row(temperature=0)] * 2).token_ids == [777, 0]


def test_rows_and_logits_must_match():
    with pytest.raises(ValueError, match="3 rows of logits, but 1 rows to sample"):
        Sampler().sample(random_logits(3), [make_row()])
