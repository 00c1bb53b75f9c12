"""The sampler against a plain implementation that takes one row at a time, in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom.runner.sampler import Sampler, SampleRow, invert_cumulative
from pageloom.runner.truncation import TOP_K_WITHOUT_SORT, truncate
from pageloom.scheduling.params import SamplingParams

VOCAB = 24
EPSILON = 1e-5  # float32 may put a token this near to a limit on either side of it


def make_row(output=(), prompt=(), eos=(), **params):
    return SampleRow(SamplingParams(**params), list(prompt), list(output), eos)


def random_logits(num_rows, vocab_size=VOCAB, seed=0):
    return 2 * torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed))


# -- the plain implementation -------------------------------------------------------------------


def adjusted(logits, row):
    params, out = row.params, [float(x) for x in logits]
    for token, bias in (params.logit_bias or {}).items():
        out[token] += bias
    if len(row.output_token_ids) < params.min_tokens and row.mask is None:
        for token in {*row.eos_token_ids, *params.stop_token_ids}:
            out[token] = -math.inf
    for token in range(len(out)):
        count = row.output_token_ids.count(token)
        if count or token in row.prompt_token_ids:
            penalty = params.repetition_penalty
            out[token] = out[token] / penalty if out[token] > 0 else out[token] * penalty
        out[token] -= params.frequency_penalty * count
        if count:
            out[token] -= params.presence_penalty
    return out if row.mask is None else guided(out, row)


def guided(logits, row):
    """Only what the mask allows, of which nothing ends the output before ``min_tokens`` if there is
    a choice."""
    bits = np.unpackbits(np.frombuffer(row.mask, np.uint8), bitorder="little")
    allowed = set(np.flatnonzero(bits))
    ends = {*row.eos_token_ids, *row.params.stop_token_ids}
    if len(row.output_token_ids) < row.params.min_tokens and allowed - ends:
        allowed -= ends
    return [x if token in allowed else -math.inf for token, x in enumerate(logits)]


def pack_mask(tokens):
    bits = np.zeros(VOCAB, np.uint8)
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def softmax(logits):
    weights = np.exp(np.array(logits) - max(logits))
    return weights / weights.sum()


def kept_tokens(probs, params, slack=0.0):
    """What min-p, top-k and top-p keep; ``slack`` keeps that much less (or more, below 0)."""
    ranked = sorted(range(len(probs)), key=lambda token: -probs[token])
    floor = min(1, params.min_p * (1 + slack)) * probs[ranked[0]]
    ranked = [token for token in ranked if probs[token] >= floor]
    if 0 < params.top_k < len(ranked):
        kth = probs[ranked[params.top_k - 1]] * (1 + min(slack, 0))
        ranked = [token for token in ranked if probs[token] >= kth]
    mass, total, kept = 0.0, sum(probs[t] for t in ranked), []
    for token in ranked:
        kept.append(token)
        mass += probs[token]
        if params.top_p < 1 and mass >= (params.top_p - slack) * total:
            break
    lowest = probs[kept[-1]] * (1 + min(slack, 0))
    return {token for token, prob in enumerate(probs) if prob and prob >= lowest}


def distribution(logits, row):
    scaled = [x / row.params.temperature for x in adjusted(logits.tolist(), row)]
    probs = softmax(scaled)
    kept = kept_tokens(probs, row.params, -EPSILON)
    assert kept == kept_tokens(probs, row.params, EPSILON), "pick a case away from the limits"
    probs = np.array([p if token in kept else 0 for token, p in enumerate(probs)])
    return probs / probs.sum()


def assert_drawn_from(probs, tokens):
    """Pearson's chi-square test at a level of about 1e-4 (Wilson and Hilferty 1931)."""
    counts = np.bincount(tokens, minlength=len(probs))
    assert not counts[probs == 0].any()
    expected = probs * len(tokens)
    rare = expected < 5
    observed = [*counts[~rare], counts[rare].sum()]
    expected = [*expected[~rare], expected[rare].sum()]
    cells = [(o, e) for o, e in zip(observed, expected, strict=True) if e > 0]
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    freedom = max(1, len(cells) - 1)
    limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * math.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (statistic, limit, cells)


# -- any mix of rows ----------------------------------------------------------------------------

token_ids = st.integers(0, VOCAB - 1)


@st.composite
def sample_rows(draw):
    names = ["bias", "penalty", "min", "stop", "k", "p", "m", "logprobs"]
    maybe = draw(st.sets(st.sampled_from(names)))
    params = {"temperature": draw(st.sampled_from([0, 0.2, 1, 1.0, 3])), "seed": 5}
    if "bias" in maybe:
        params["logit_bias"] = draw(st.dictionaries(token_ids, st.floats(-9, 9), max_size=4))
    if "penalty" in maybe:
        params["repetition_penalty"] = draw(st.sampled_from([0.5, 1.0, 1.3]))
        params["presence_penalty"] = draw(st.sampled_from([-1.0, 0.0, 0.7]))
        params["frequency_penalty"] = draw(st.sampled_from([-0.5, 0.0, 0.3]))
    if "min" in maybe:
        params["min_tokens"] = draw(st.integers(0, 6))
    if "stop" in maybe:
        params["stop_token_ids"] = draw(st.lists(token_ids, max_size=3))
    if "k" in maybe:
        params["top_k"] = draw(st.sampled_from([-1, 1, 2, 5, VOCAB, 99]))
    if "p" in maybe:
        params["top_p"] = draw(st.floats(0.05, 1))
    if "m" in maybe:
        params["min_p"] = draw(st.floats(0, 1))
    if "logprobs" in maybe:
        params["logprobs"] = draw(st.integers(0, 6))
    prompt, output = draw(st.lists(token_ids, max_size=9)), draw(st.lists(token_ids, max_size=9))
    eos = draw(st.frozensets(token_ids, max_size=2))
    masks = st.sets(token_ids, min_size=1).map(pack_mask)
    mask = draw(st.none() | masks)
    return SampleRow(SamplingParams(**params), prompt, output, eos, mask=mask)


@st.composite
def batches(draw):
    rows = draw(st.lists(sample_rows(), min_size=1, max_size=6))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    # Quarters make ties common.
    return torch.randint(-24, 25, (len(rows), VOCAB), generator=random) / 4, rows


@settings(max_examples=100, deadline=None)
@given(batches())
def test_each_row_of_a_mixed_batch_is_treated_as_it_would_be_alone(batch):
    logits, rows = batch
    output = Sampler().sample(logits.clone(), rows)
    for i, row in enumerate(rows):
        token, expected = output.token_ids[i], adjusted(logits[i].tolist(), row)
        if row.params.greedy:
            assert expected[token] == pytest.approx(max(expected), abs=1e-4)
        else:
            probs = softmax([x / row.params.temperature for x in expected])
            assert token in kept_tokens(probs, row.params, -EPSILON)
        alone = Sampler().sample(logits[i : i + 1].clone(), [row])
        assert (alone.token_ids[0], alone.logprobs[0]) == (token, output.logprobs[i])
        assert_scored(output.logprobs[i], logits[i], token, row.params.logprobs)


def assert_scored(scored, logits, token, num_top):
    if num_top is None:
        assert scored is None
        return
    expected = np.log(softmax(logits.tolist()))
    assert scored.token_id == token
    assert scored.logprob == pytest.approx(expected[token], abs=1e-5)
    assert scored.rank == 1 + int((logits > logits[token]).sum())
    values = [value for _, value in scored.top]
    assert values == pytest.approx(sorted(expected, reverse=True)[:num_top], abs=1e-5)
    assert all(value == pytest.approx(expected[t], abs=1e-5) for t, value in scored.top)
    assert len({t for t, _ in scored.top}) == len(scored.top) == num_top


@settings(max_examples=100, deadline=None)
@given(batches())
def test_truncation_keeps_exactly_what_min_p_top_k_and_top_p_say(batch):
    logits, rows = batch
    probs = logits.softmax(1)
    cut = probs.clone()
    truncate(cut, [row.params for row in rows])
    for before, after, row in zip(probs, cut, rows, strict=True):
        kept = set(after.nonzero().flatten().tolist())
        exact = before.double().numpy()
        assert kept_tokens(exact, row.params, EPSILON) <= kept
        assert kept <= kept_tokens(exact, row.params, -EPSILON)
        assert torch.equal(after[after > 0], before[after > 0])


@pytest.mark.parametrize("vocab_size", [7, 1000, 2 * TOP_K_WITHOUT_SORT])
@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (2, 0.5, 7),  # the likeliest holds 4/10 of the mass, six ties with the second 1/10 each
        (2, 0.4, 1),
        (2, 0.41, 7),
        (3, 1.0, 7),
        (1, 0.9, 1),
        (6, 0.39, 1),
    ],
)
def test_ties_with_the_kth_token_belong_to_the_mass_that_top_p_is_of(
    top_k, top_p, kept, vocab_size
):
    weights = torch.zeros(vocab_size)
    weights[:7] = torch.tensor([1.0, 1.0, 4.0, 1.0, 1.0, 1.0, 1.0]) / 16
    weights[7:] = 1e-6
    # Another row of the batch has more of the largest values listed, or all of them sorted.
    for other in (1, 5, TOP_K_WITHOUT_SORT + 1):
        probs = torch.stack([weights, weights])
        truncate(probs, [SamplingParams(top_k=top_k, top_p=top_p), SamplingParams(top_k=other)])
        assert int(probs[0].count_nonzero()) == kept


@pytest.mark.parametrize("top_k", [3, TOP_K_WITHOUT_SORT, TOP_K_WITHOUT_SORT + 1, 900])
def test_top_k_is_the_same_by_selection_and_by_sorting(top_k):
    params = SamplingParams(top_k=top_k, top_p=0.8, min_p=1e-4)
    probs = random_logits(4, 1000).softmax(1)
    cut = probs.clone()
    truncate(cut, [params] * 4)
    for before, after in zip(probs, cut, strict=True):
        kept = set(after.nonzero().flatten().tolist())
        exact = before.double().numpy()
        assert kept_tokens(exact, params, EPSILON) <= kept <= kept_tokens(exact, params, -EPSILON)


# -- distributions ------------------------------------------------------------------------------

MIXED = [
    {},
    {"temperature": 0.6},
    {"temperature": 2.5, "top_k": 7},
    {"top_p": 0.8},
    {"top_k": 9, "top_p": 0.7},
    {"min_p": 0.1},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.9, "temperature": 1.7},
    {"repetition_penalty": 1.4, "prompt": [1, 2, 3], "output": [3, 4]},
    {"presence_penalty": 1.5, "frequency_penalty": 0.8, "output": [5, 5, 6]},
    {"logit_bias": {0: 3.0, 9: -100.0}},
    {"min_tokens": 4, "eos": [2, 3], "stop_token_ids": [4]},
]


@pytest.mark.parametrize("seeded", [False, True])
def test_tokens_of_a_mixed_batch_follow_each_rows_own_distribution(seeded):
    rounds, logits = 40, random_logits(len(MIXED))
    per_round = 100
    drawn = [[] for _ in MIXED]
    sampler = Sampler(seed=3)
    for step in range(rounds):
        rows = [
            make_row(**fields, seed=step * per_round + repeat if seeded else None)
            for repeat in range(per_round)
            for fields in MIXED
        ]
        output = sampler.sample(logits.repeat(per_round, 1), rows)
        for i, token in enumerate(output.token_ids):
            drawn[i % len(MIXED)].append(token)
    for row_logits, fields, tokens in zip(logits, MIXED, drawn, strict=True):
        assert_drawn_from(distribution(row_logits, make_row(**fields)), tokens)


def test_the_positions_of_one_seeded_row_are_independent_draws():
    logits = random_logits(1, vocab_size=4)
    rows = [make_row(output=[0] * position, seed=11) for position in range(4000)]
    tokens = Sampler().sample(logits.repeat(len(rows), 1), rows).token_ids
    probs = distribution(logits[0], make_row())
    assert_drawn_from(probs, tokens)
    pairs = [4 * a + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_drawn_from(np.outer(probs, probs).flatten(), pairs)


# -- seeds and batching -------------------------------------------------------------------------


def test_a_seeded_row_draws_the_same_whoever_shares_its_batch():
    logits, row = random_logits(8), make_row(output=[1, 2], seed=42, top_p=0.95)
    alone = Sampler(seed=0).sample(logits[:1].clone(), [row]).token_ids[0]
    others = [make_row(seed=s, top_k=s + 1, temperature=0.5 * s) for s in range(7)]
    for at in range(8):
        order = [*range(1, at + 1), 0, *range(at + 1, 8)]
        rows = [*others[:at], row, *others[at:]]
        assert Sampler(seed=at).sample(logits[order], rows).token_ids[at] == alone


def test_a_seeded_row_continues_after_a_preemption_as_if_there_had_been_none():
    logits = random_logits(6)

    def draw(sampler, output, position):
        row = make_row(output=output, seed=7)
        return sampler.sample(logits[position : position + 1].clone(), [row]).token_ids

    whole, sampler = [], Sampler(seed=1)
    for position in range(6):
        whole += draw(sampler, whole, position)
    resumed, sampler = whole[:3], Sampler(seed=2)
    for position in range(3, 6):
        resumed += draw(sampler, resumed, position)
    assert resumed == whole


def test_seeds_differ_and_rows_without_one_share_the_samplers():
    flat, rows = torch.zeros(64, 1000), [make_row() for _ in range(64)]

    def draw(seed):
        return Sampler(seed).sample(flat.clone(), rows).token_ids

    assert draw(1) == draw(1) != draw(2)
    assert len(set(draw(1))) > 50
    by_seed = Sampler().sample(flat.clone(), [make_row(seed=-s) for s in range(64)]).token_ids
    assert len(set(by_seed)) > 50


# -- inverting the cumulative distribution ------------------------------------------------------


def test_the_ends_of_the_unit_interval_draw_the_outermost_tokens_that_have_weight():
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7, 0.0]] * 4)
    uniform = torch.tensor([[0.0], [0.29], [0.31], [1 - 2**-24]])
    assert invert_cumulative(weights, uniform)[0].tolist() == [1, 1, 3, 3]


def test_a_scan_that_rises_at_a_weight_of_zero_draws_the_likeliest_instead(monkeypatch):
    uneven = torch.tensor([[0.0, 0.3, 0.3000001, 1.0]])
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda self, dim: uneven)
    weights = torch.tensor([[0.0, 0.3, 0.0, 0.7]])
    assert invert_cumulative(weights, torch.tensor([[0.30000005]]))[0].tolist() == [3]


# -- logprobs -----------------------------------------------------------------------------------


def test_the_greedy_tokens_logprob_is_the_top_ones_to_the_last_bit():
    logits = random_logits(50, vocab_size=4096)
    rows = [make_row(temperature=0, logprobs=3)] * 50
    for scored in Sampler().sample(logits, rows).logprobs:
        assert scored.top[0] == (scored.token_id, scored.logprob)
        assert scored.rank == 1


def test_logprobs_are_those_of_the_model_whatever_was_done_to_choose():
    logits = random_logits(1)
    fields = {"logit_bias": {4: 100.0}, "temperature": 0.1, "top_k": 1, "logprobs": 2}
    scored = Sampler().sample(logits.clone(), [make_row(**fields)]).logprobs[0]
    assert scored.token_id == 4
    assert_scored(scored, logits[0], 4, 2)


@pytest.mark.parametrize("num_top", [0, 1, 5])
def test_prompt_logprobs_score_the_tokens_that_follow(num_top):
    logits, following = random_logits(6), torch.tensor([0, 5, 9, 9, 23, 1])
    before = logits.clone()
    scored = Sampler().prompt_logprobs(logits, following, num_top)
    assert torch.equal(logits, before)
    for row, token, score in zip(logits, following.tolist(), scored, strict=True):
        assert_scored(score, row, token, num_top)
