"""What a step yields for each chunk, whatever the other chunks of the step do."""

import math
from types import SimpleNamespace

import pytest
import torch

from pageloom.engine.planned import PlannedStep
from pageloom.memory import BlockPool
from pageloom.models.model import Model
from pageloom.runner.runner import PROMPT_LOGPROB_ROWS, ModelRunner
from pageloom.runner.sampler import Sampler
from pageloom.scheduling import Chunk, Request, SamplingParams, StepPlan

VOCAB = 16
NAN_TOKEN = 13  # what follows it has logits of NaN


class Successor(Model):
    """After token t comes t + 1, and after `NAN_TOKEN` nothing that could be read."""

    layers = ()
    vocab_size = VOCAB

    def __init__(self):
        self.rows = 0

    def forward(self, token_ids, positions, attend):
        return token_ids[:, None]

    def logits(self, hidden):
        self.rows += len(hidden)
        logits = torch.zeros(len(hidden), VOCAB)
        logits.scatter_(1, (hidden + 1) % VOCAB, 9.0)
        return logits.masked_fill(hidden == NAN_TOKEN, math.nan)


class NoAttention:
    spec = SimpleNamespace(block_size=4)
    fuses_rotary = False

    def bytes_per_block(self):
        return 0

    def plan(self, batch):
        pass

    def forward(self, *args):
        raise AssertionError("the model has no attention")


@pytest.fixture
def runner():
    return ModelRunner(Successor(), NoAttention(), Sampler(), torch.device("cpu"))


@pytest.fixture
def pool():
    return BlockPool(1000)


def make_chunk(pool, prompt, start=0, stop=None, **params):
    stop = len(prompt) if stop is None else stop
    sampling = SamplingParams(temperature=0, **params)
    request = Request("r", prompt, sampling, arrival_time=0.0, eos_token_ids=frozenset({0, 99}))
    request.open(pool, 4, 8)
    branch = request.branches[0]
    branch.table.grow(stop)
    branch.num_computed = start
    return Chunk(branch, start, stop - start, int(stop == len(prompt)))


def run(runner, chunks):
    planned = PlannedStep(StepPlan(tuple(chunks)))
    return planned.results(runner.run(planned.step))


def by_chunk(runner, chunks):
    results = {id(result.chunk): result for result in run(runner, chunks)}
    return [results[id(chunk)] for chunk in chunks]


def test_a_chunk_that_cannot_be_sampled_fails_alone(runner, pool):
    prompts = [[1, 2], [4, NAN_TOKEN], [5]]
    good, bad, also_good = by_chunk(
        runner, [make_chunk(pool, prompt, logprobs=1) for prompt in prompts]
    )
    assert (tokens(good), tokens(also_good)) == ([3], [6])
    assert good.failure is also_good.failure is None
    assert not bad.draws
    assert "no token can be drawn" in bad.failure
    assert "check its weights and dtype" in bad.failure


def test_a_chunk_whose_every_token_is_banned_says_so(runner, pool):
    banned = make_chunk(pool, [1], min_tokens=1, stop_token_ids=list(range(VOCAB)))
    good, bad = by_chunk(runner, [make_chunk(pool, [1]), banned])
    assert (tokens(good), tokens(bad)) == ([2], [])
    assert "excludes every token of the vocabulary" in bad.failure
    assert "min_tokens" in bad.failure


def tokens(result):
    return [draw.token_id for draw in result.draws]


@pytest.mark.parametrize("before", [0, 3, PROMPT_LOGPROB_ROWS + 5])
def test_a_prompt_that_cannot_be_scored_fails_alone_and_names_the_position(runner, pool, before):
    prompt = [1] * before + [NAN_TOKEN, 2, 3]
    good, bad = by_chunk(
        runner,
        [make_chunk(pool, [1, 2], prompt_logprobs=1), make_chunk(pool, prompt, prompt_logprobs=1)],
    )
    assert tokens(good) == [3]
    assert [score.token_id for score in good.prompt_logprobs] == [2]
    assert not bad.draws
    assert bad.prompt_logprobs == []
    assert f"prompt token at position {before + 1} cannot be scored" in bad.failure


def test_the_chunks_of_a_prompt_score_it_once(runner, pool):
    prompt = list(range(1, 9))
    chunks = [
        make_chunk(pool, prompt, start, stop, prompt_logprobs=0)
        for start, stop in ((0, 3), (3, 7), (7, 8))
    ]
    results = [result for chunk in chunks for result in run(runner, [chunk])]
    scored = [score.token_id for result in results for score in result.prompt_logprobs]
    assert scored == prompt[1:]


@pytest.mark.parametrize("computed", [1, 3, 5, 7])
def test_prompt_tokens_that_were_scored_before_a_preemption_cost_no_logits(runner, pool, computed):
    prompt = list(range(1, 9))
    chunk = make_chunk(pool, prompt, computed, prompt_logprobs=0)
    chunk.branch.drop()
    chunk.branch.table.grow(len(prompt))
    scored = []
    for start, stop in ((0, 4), (4, 8)):
        runner.model.rows = 0
        again = Chunk(chunk.branch, start, stop - start, int(stop == len(prompt)))
        (result,) = run(runner, [again])
        assert runner.model.rows == len(result.prompt_logprobs) + again.draws
        scored += [score.token_id for score in result.prompt_logprobs]
    assert scored == prompt[computed + 1 :]
