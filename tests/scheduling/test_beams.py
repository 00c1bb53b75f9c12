"""Beam search against `transformers`, which runs its own search on the same model."""

import functools
import math

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pageloom.scheduling.beams import BeamSearch, Hypothesis

PROMPT = [5, 7, 11, 2]
EOS = 3


@functools.cache
def model(seed):
    """A model that ends some outputs soon and others late."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        initializer_range=0.7,
        bos_token_id=None,
        eos_token_id=None,
    )
    made = LlamaForCausalLM(config).eval()
    bias = torch.zeros(config.vocab_size)
    bias[EOS] = 2.5
    made.lm_head.bias = torch.nn.Parameter(bias)
    return made


@torch.inference_mode()
def candidates_of(seed, beams, count):
    logits = model(seed)(torch.tensor([[*PROMPT, *beam] for beam in beams])).logits[:, -1]
    best = logits.log_softmax(-1).topk(min(count, logits.shape[1]))
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [list(zip(*row, strict=True)) for row in pairs]


def search_on(seed, search):
    """Run a search to its end; returns the number of steps."""
    beams, steps = [[]], 0
    while not search.done:
        chosen = search.step(beams, candidates_of(seed, beams, search.num_candidates))
        beams = [[*beams[parent], token] for parent, token in chosen]
        assert len(beams) == (0 if search.done else search.width)
        steps += 1
    return steps


def expected(seed, width, eos=(EOS,), max_tokens=12, min_tokens=None, num_return=1, **options):
    """(token ids, score) of each output, best first."""
    made = model(seed).generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.int64),
        num_beams=width,
        num_return_sequences=num_return,
        do_sample=False,
        max_new_tokens=max_tokens,
        min_new_tokens=min_tokens,
        eos_token_id=list(eos) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    outputs = made.sequences[:, len(PROMPT) :].tolist()
    ends = [next((i + 1 for i, t in enumerate(o) if t in eos), len(o)) for o in outputs]
    cut = [output[:end] for output, end in zip(outputs, ends, strict=True)]
    return list(zip(cut, made.sequences_scores.tolist(), strict=True))


def check(seed, width, eos=(EOS,), max_tokens=12, num_return=1, min_tokens=0, **options):
    """Compare a search with that of `transformers`; returns its outputs and its steps."""
    search = BeamSearch(
        width,
        max_tokens=max_tokens,
        min_tokens=min_tokens,
        eos_token_ids=eos,
        num_return=num_return,
        **options,
    )
    steps = search_on(seed, search)
    wanted = expected(seed, width, eos, max_tokens, min_tokens or None, num_return, **options)
    found = search.results()
    assert [hypothesis.token_ids for hypothesis in found] == [token_ids for token_ids, _ in wanted]
    assert [hypothesis.score for hypothesis in found] == pytest.approx(
        [score for _, score in wanted], rel=1e-5, abs=1e-5
    )
    for hypothesis in found:
        ended = hypothesis.token_ids[-1] in eos
        assert hypothesis.finish_reason == ("stop" if ended else "length")
        assert ended or len(hypothesis.token_ids) == max_tokens
    return found, steps


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("width", [2, 4, 6])
def test_outputs_and_scores_are_those_of_transformers(width, length_penalty, early_stopping):
    for seed in range(4):
        check(
            seed,
            width,
            num_return=width,
            length_penalty=length_penalty,
            early_stopping=early_stopping,
        )


DEFAULTS = {"length_penalty": 1.0, "early_stopping": False}


@pytest.mark.parametrize("seed", [1, 3, 5])
def test_each_way_to_stop_early_takes_its_own_number_of_steps(seed):
    steps = [
        check(seed, 4, max_tokens=32, length_penalty=1.0, early_stopping=when)[1]
        for when in (True, False, "never")
    ]
    assert 1 < steps[0] < steps[1] < steps[2]


@pytest.mark.parametrize("eos", [(), (3, 9), (3, 9, 14)])
def test_there_may_be_no_end_of_sequence_token_or_several(eos):
    for seed in range(4):
        check(seed, 4, eos, num_return=4, **DEFAULTS)


@pytest.mark.parametrize("min_tokens", [1, 5, 12])
def test_nothing_ends_before_min_tokens(min_tokens):
    for seed in range(4):
        found, _ = check(seed, 4, min_tokens=min_tokens, num_return=4, **DEFAULTS)
        assert all(len(h.token_ids) > min_tokens or h.finish_reason == "length" for h in found)


def test_one_token_of_output_takes_one_step():
    for seed in range(4):
        _, steps = check(seed, 4, max_tokens=1, num_return=4, **DEFAULTS)
        assert steps == 1


def test_fewer_outputs_may_be_returned_than_there_are_beams():
    two, _ = check(0, 6, num_return=2, **DEFAULTS)
    six, _ = check(0, 6, num_return=6, **DEFAULTS)
    assert two == six[:2]


def logprobs(*probabilities):
    return [(token, math.log(p)) for token, p in probabilities]


def test_only_the_first_continuations_may_finish_and_the_others_live_on():
    search = BeamSearch(2, max_tokens=9, eos_token_ids=[0], stop_token_ids=[1], **DEFAULTS)
    assert search.num_candidates == 4
    chosen = search.step([[]], [logprobs((0, 0.4), (7, 0.3), (1, 0.2), (8, 0.1))])
    assert chosen == [(0, 7), (0, 8)]  # token 1 ends as well, but is only the third likeliest
    assert search.scores == pytest.approx([math.log(0.3), math.log(0.1)])
    assert search.results() == [Hypothesis([0], math.log(0.4), "stop", None)]


def test_when_every_likely_continuation_ends_the_search_goes_on_with_the_rest():
    search = BeamSearch(2, max_tokens=9, stop_token_ids=[0, 1], num_return=2, **DEFAULTS)
    first = logprobs((0, 0.5), (1, 0.47), (7, 0.02), (8, 0.01))
    assert search.step([[]], [first]) == []  # a sum of log 0.02 cannot beat log 0.47
    assert search.done
    assert [(h.token_ids, h.stop_reason) for h in search.results()] == [([0], 0), ([1], 1)]
    search = BeamSearch(2, max_tokens=9, stop_token_ids=[0, 1], length_penalty=8.0,
                        early_stopping="never")  # fmt: skip
    assert search.step([[]], [first]) == [(0, 7), (0, 8)]  # after 9 tokens it can


def test_a_negative_length_penalty_judges_live_beams_by_their_present_length():
    search = BeamSearch(
        2, max_tokens=9, eos_token_ids=[0], length_penalty=-1.0, early_stopping="never"
    )
    assert search.step([[]], [logprobs((7, 0.6), (0, 0.3), (8, 0.1))]) == [(0, 7), (0, 8)]
    rows = [logprobs((7, 0.85), (0, 0.1), (8, 0.05)), logprobs((0, 0.5), (7, 0.5))]
    # 2 * log(0.6 * 0.85) is better, 9 * log(0.6 * 0.85) is worse than 2 * log(0.6 * 0.1).
    assert search.step([[7], [8]], rows) == [(0, 7), (1, 7)]


def test_a_live_beam_that_could_only_draw_level_is_not_pursued():
    search = BeamSearch(2, max_tokens=9, eos_token_ids=[0, 1], **DEFAULTS)
    assert search.step([[]], [[(0, -1.0), (1, -1.0), (7, -1.0), (8, -2.0)]]) == []


def test_equal_sums_go_to_the_earlier_beam_and_then_to_the_earlier_candidate():
    search = BeamSearch(3, max_tokens=9, **DEFAULTS)
    same = [(9, -1.0), (4, -1.0), (6, -1.0)]
    assert search.step([[]], [same]) == [(0, 9), (0, 4), (0, 6)]
    assert search.step([[9], [4], [6]], [same] * 3) == [(0, 9), (0, 4), (0, 6)]


def test_a_vocabulary_smaller_than_the_width_starts_with_fewer_beams():
    search = BeamSearch(4, max_tokens=3, num_return=4, **DEFAULTS)
    row = logprobs((1, 0.75), (2, 0.25))
    beams = [[1], [2]]
    assert search.step([[]], [row]) == [(0, 1), (0, 2)]
    assert search.step(beams, [row, row]) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def test_what_has_finished_before_the_search_is_done_can_be_had():
    search = BeamSearch(2, max_tokens=9, eos_token_ids=[0], num_return=2, **DEFAULTS)
    assert search.results() == []
    search.step([[]], [logprobs((0, 0.6), (7, 0.3), (8, 0.1))])
    assert [hypothesis.token_ids for hypothesis in search.results()] == [[0]]
    assert not search.done
