"""Cost of one sampling step for 64 rows of a 49,152-token vocabulary.

``pytest benchmarks/test_sampler.py --benchmark-enable``
"""

import pytest
import torch

from pageloom.runner.sampler import Sampler, SampleRow
from pageloom.scheduling.params import SamplingParams

NUM_ROWS, VOCAB_SIZE = 64, 49_152
CASES = {
    "greedy": SamplingParams(temperature=0),
    "temperature": SamplingParams(temperature=0.8),
    "seeded": SamplingParams(temperature=0.8, seed=1),
    "min_p": SamplingParams(min_p=0.05),
    "top_k": SamplingParams(top_k=50),
    "top_p": SamplingParams(top_p=0.9),
    "top_k_top_p": SamplingParams(top_k=50, top_p=0.9),
    "greedy_penalties": SamplingParams(
        temperature=0, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5
    ),
    "greedy_logprobs": SamplingParams(temperature=0, logprobs=5),
}


@pytest.mark.parametrize("case", CASES)
def test_sample(benchmark, case):
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(NUM_ROWS, VOCAB_SIZE, generator=random)
    tokens = torch.randint(VOCAB_SIZE, (NUM_ROWS, 700), generator=random).tolist()
    rows = [SampleRow(CASES[case], row[:500], row[500:], ()) for row in tokens]
    sampler = Sampler(seed=0)
    output = benchmark.pedantic(
        sampler.sample, setup=lambda: ((logits.clone(), rows), {}), rounds=15, warmup_rounds=2
    )
    assert len(output.token_ids) == NUM_ROWS
