"""Request lengths and arrivals like those of the vLLM paper, from its published statistics.

The paper (Kwon et al., SOSP 2023) took lengths from two datasets and published their means (figure
11). Here they are drawn from distributions with those means, or from a file of real lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from statistics import NormalDist
from typing import NamedTuple, Protocol

MAX_MODEL_LEN = 2048  # tokens; of OPT-13B and of LLaMA-13B

_SIDE = 8
STRATA = _SIDE**2

_NORMAL = NormalDist()


class Lengths(NamedTuple):
    prompt_tokens: int
    output_tokens: int


class Arrival(NamedTuple):
    time: float  # seconds
    lengths: Lengths


class LengthSource(Protocol):
    @property
    def name(self) -> str: ...

    def lengths(self, count: int, random: Random) -> list[Lengths]:
        """The lengths of ``count`` requests; none needs more than `MAX_MODEL_LEN` tokens."""


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Log-normal token counts without those above ``longest``; ``mean`` is the mean of the rest."""

    mean: float
    sigma: float  # standard deviation of the logarithm, before the cut
    longest: int

    def quantile(self, share: float) -> int:
        """The value below which this share of the distribution lies."""
        mu = _mu(self.mean, self.sigma, self.longest)
        kept = _NORMAL.cdf((math.log(self.longest) - mu) / self.sigma)
        value = math.exp(mu + self.sigma * _NORMAL.inv_cdf(kept * share))
        return max(1, min(self.longest, round(value)))


@cache
def _mu(mean: float, sigma: float, longest: int) -> float:
    """The mean of the logarithm before the cut, by bisection on the mean after it."""
    low, high = math.log(mean) - sigma**2, math.log(longest) + sigma**2
    for _ in range(60):
        mu = (low + high) / 2
        cut = (math.log(longest) - mu) / sigma
        share = _NORMAL.cdf(cut - sigma) / _NORMAL.cdf(cut)
        if math.exp(mu + sigma**2 / 2) * share < mean:
            low = mu
        else:
            high = mu
    return low


@dataclass(frozen=True, slots=True)
class Workload:
    """Independent prompt and output lengths; an output is cut where the model's length ends.

    They are drawn by orthogonal sampling, so that a short run is like a long one: of `STRATA`
    requests in a row, one has its prompt in each of as many equally likely ranges, one its output,
    and in the square of both they are spread evenly.
    """

    name: str
    prompt: LogNormal
    output: LogNormal

    def lengths(self, count: int, random: Random) -> list[Lengths]:
        lengths: list[Lengths] = []
        while len(lengths) < count:
            for ranks in _spread_evenly(random):
                prompt, output = ((rank + 1 - random.random()) / STRATA for rank in ranks)
                tokens = self.prompt.quantile(prompt)
                room = MAX_MODEL_LEN - tokens
                lengths.append(Lengths(tokens, min(self.output.quantile(output), room)))
        return lengths[:count]


def _spread_evenly(random: Random) -> list[tuple[int, int]]:
    """Every number below `STRATA` once as first and once as second of a pair, and a pair in each
    cell of a coarse grid over both; in random order."""
    columns = [random.sample(range(_SIDE), _SIDE) for _ in range(_SIDE)]
    rows = [random.sample(range(_SIDE), _SIDE) for _ in range(_SIDE)]
    pairs = [
        (column * _SIDE + columns[column][row], row * _SIDE + rows[row][column])
        for column in range(_SIDE)
        for row in range(_SIDE)
    ]
    random.shuffle(pairs)
    return pairs


@dataclass(frozen=True, slots=True)
class RecordedLengths:
    """Lengths of real requests, drawn with replacement."""

    name: str
    recorded: Sequence[Lengths]

    def lengths(self, count: int, random: Random) -> list[Lengths]:
        return random.choices(self.recorded, k=count)


# Means: figure 11 of the paper. Its authors' benchmark leaves prompts above 1,024 tokens out.
#
# Spread of ShareGPT's outputs: from what Orca (Max) reserves in figure 2, which depends on the
# outputs alone. A running request waits for half of its output on average over its run, so
# E[o^2] / E[o] / 2 = 13.3 % of 15,728 slots / 7.00 requests, a standard deviation of 296 tokens.
# Of its prompts no number is published; figure 11 shows a long tail, and a standard deviation of
# 220 tokens is assumed (docs/memory.md says what depends on it).
SHAREGPT = Workload(
    "ShareGPT", LogNormal(161.31, 2.19, longest=1024), LogNormal(337.99, 0.85, longest=2047)
)
# Spread of Alpaca: from its data file (52,002 records; in characters, outputs have mean 270.31 and
# standard deviation 275.03, instructions 59.78 and 21.19, inputs 22.91 and 57.51), taking tokens
# to be in proportion to characters.
ALPACA = Workload(
    "Alpaca", LogNormal(19.31, 0.66, longest=1024), LogNormal(58.45, 0.85, longest=1024)
)


def poisson_arrivals(source: LengthSource, rate: float, seconds: float, seed: int) -> list[Arrival]:
    """What arrives in ``seconds`` by a Poisson process of ``rate`` requests per second."""
    random = Random(f"{seed} {source.name} arrivals")
    times, now = [], random.expovariate(rate)
    while now < seconds:
        times.append(now)
        now += random.expovariate(rate)
    lengths = source.lengths(len(times), Random(f"{seed} {source.name} lengths"))
    return [Arrival(time, length) for time, length in zip(times, lengths, strict=True)]
