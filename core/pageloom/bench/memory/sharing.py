"""Blocks saved by sharing within a request: parallel samples and beams, on the control plane."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Sequence
from random import Random
from statistics import fmean
from typing import NamedTuple

from pageloom.bench.memory.paged import Paged, new_request
from pageloom.bench.memory.paper import Method
from pageloom.bench.memory.settings import Settings
from pageloom.bench.workload import Lengths
from pageloom.memory import distinct_blocks
from pageloom.scheduling import Branch, Request

REPEATS_AFTER = 180
"""Output tokens after which a text begins to repeat itself, so that its next token is ever more
certain. SmolLM2-135M-Instruct does there, under beam search that may not end (docs/memory.md)."""


def concentration(position: int, repeats_after: int) -> float:
    """How flat the probabilities of the next token are, at a position of the output.

    At 1 the likeliest token has probability 0.62 on average, and SmolLM2-135M-Instruct gives it
    0.6 in the first 180 tokens, 0.77, 0.84 and 0.88 around 210, 270 and 320. The power fits these.
    """
    return min(1.0, (repeats_after / position) ** 3)


def likeliest(random: Random, count: int, concentration: float) -> list[float]:
    """Log-probabilities of the ``count`` likeliest tokens of a model, the likeliest first.

    The probabilities are made by breaking pieces off a stick, each a Beta(1, ``concentration``)
    share of what is left (the GEM distribution of Griffiths, Engen and McCloskey): as in a
    language model, few tokens have nearly all, and more of them the higher the concentration.
    """
    rest, top = 1.0, [0.0] * count
    while rest > top[-1]:  # a later piece could still be among the largest
        piece = rest * random.betavariate(1.0, concentration)
        rest -= piece
        top.append(piece)
        top.sort(reverse=True)
        top.pop()
    return [math.log(max(probability, sys.float_info.min)) for probability in top]


class _Beams(Paged):
    """Each beam draws its candidates anew in every step."""

    def __init__(self, settings: Settings, repeats_after: int) -> None:
        super().__init__(settings)
        self._repeats_after = repeats_after
        self._random = Random(f"{settings.seed} beams")

    def candidates(self, branch: Branch, count: int) -> list[tuple[int, float]]:
        flatness = concentration(len(branch.output_token_ids) + 1, self._repeats_after)
        return list(enumerate(likeliest(self._random, count, flatness)))


class Saving(NamedTuple):
    """Blocks saved by sharing over blocks without sharing (section 6.3), over the steps of a run.

    The paper does not say how it averages.
    """

    of_blocks: float  # of the sums over all requests: long outputs weigh more
    per_request: float  # of each request, averaged over requests


def measure_saving(
    settings: Settings,
    lengths: Sequence[Lengths],
    method: Method,
    width: int,
    repeats_after: int = REPEATS_AFTER,
) -> Saving:
    """Let every request run to its end, with ``width`` samples or beams of its output length.

    Nothing is shared between requests, so it does not matter how many run at a time.
    """
    simulation = _Beams(settings, repeats_after)
    requests = (
        new_request(str(number), length, beam_width=width)
        if method == "beam search"
        else new_request(str(number), length, n=width)
        for number, length in enumerate(lengths)
    )
    used: Counter[Request] = Counter()
    unshared: Counter[Request] = Counter()
    for _ in simulation.drive(requests):
        for request in simulation.planner.running.values():
            tables = [branch.table for branch in request.branches]
            used[request] += distinct_blocks(tables)
            unshared[request] += sum(len(table.blocks) for table in tables)
    if not unshared:  # all ended with their first token, before there was anything to share
        return Saving(0.0, 0.0)
    return Saving(
        of_blocks=1 - used.total() / unshared.total(),
        per_request=fmean(1 - used[request] / unshared[request] for request in unshared),
    )
