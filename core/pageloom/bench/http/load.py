"""What is asked of a server, and when: changes of a `Trace`, each of one property."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from pageloom.bench.serving.trace import RandomPrompt, Trace, with_poisson_arrivals
from pageloom.bench.workload import LengthSource
from pageloom.errors import PageloomError


def with_lengths(trace: Trace, source: LengthSource, seed: int = 0) -> Trace:
    """The trace with random prompts and outputs of other lengths. A shared prefix stays, and its
    length is part of the prompt's; a prompt is its prefix and a token at least."""
    drawn = source.lengths(len(trace), Random(f"{seed} {source.name} lengths"))
    changed = []
    for request, lengths in zip(trace, drawn, strict=True):
        wanted = request.random_prompt or RandomPrompt(0)
        own = max(1, lengths.prompt_tokens - wanted.prefix_tokens)
        changed.append(
            replace(
                request,
                random_prompt=replace(wanted, tokens=own),
                output_tokens=lengths.output_tokens,
            )
        )
    return changed


def with_prefix_share(trace: Trace, share: float, seed: int = 0) -> Trace:
    """The trace in which only a ``share`` of the requests, in random places, begin with the prefix
    of their group. The others have as many tokens of their own instead."""
    owners = Random(f"{seed} prefixes").sample(range(len(trace)), round(share * len(trace)))
    kept = set(owners)
    changed = []
    for number, request in enumerate(trace):
        wanted = request.random_prompt
        if wanted is not None and number not in kept:
            whole = RandomPrompt(wanted.prefix_tokens + wanted.tokens)
            request = replace(request, random_prompt=whole)
        changed.append(request)
    return changed


def with_arrivals(trace: Trace, rate: float, burstiness: float = 1.0, seed: int = 0) -> Trace:
    """The trace with arrivals at ``rate`` requests per second on average.

    The times between them are of a gamma distribution whose shape is ``burstiness``: 1 is a
    Poisson process, less comes in bursts, and more is ever more regular.
    """
    if burstiness == 1:
        return with_poisson_arrivals(trace, rate, seed)
    for what, value in (("rate", rate), ("burstiness", burstiness)):
        if not (value > 0 and math.isfinite(value)):
            raise PageloomError(f"the {what} is {value}, but must be above 0")
    draw, now, arriving = Random(f"{seed} arrivals"), 0.0, []
    for request in trace:
        now += draw.gammavariate(burstiness, 1 / (burstiness * rate))
        arriving.append(replace(request, arrival=now))
    return arriving
