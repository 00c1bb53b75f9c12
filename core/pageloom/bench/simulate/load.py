"""What is asked of simulated engines, and when: up to millions of requests, 28 bytes each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pageloom.bench.serving.trace import Span, Trace
from pageloom.bench.workload import STRATA, Lengths, LengthSource
from pageloom.errors import PageloomError

ROW = np.dtype(
    [
        ("arrival", "f8"),  # seconds
        ("own_tokens", "i4"),  # of the prompt, behind the shared prefix
        ("output_tokens", "i4"),
        ("group", "i4"),  # whose prefix it begins with; -1 for none
        ("tenant", "i4"),
        ("priority", "i4"),
    ]
)
_AT_ONCE = STRATA * 256  # requests that are Python objects at the same time


class Asked(NamedTuple):
    """A row of a `Load`."""

    arrival: float
    own_tokens: int
    output_tokens: int
    group: int
    tenant: int
    priority: int


@dataclass(frozen=True)
class Load:
    """Requests in order of arrival, and their prompts: a prefix that is shared within a group, and
    a part that is nobody else's."""

    source: str  # for people
    rows: NDArray[Any]  # of `ROW`, ``[N]``
    tenants: Sequence[str]  # names by number
    prefixes: Sequence[Sequence[int]] = ()  # token ids by group
    given: Sequence[Sequence[int]] | None = None
    """Whole prompts by request, where a trace has them; else nothing but their length counts."""

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Asked]:
        for start in range(0, len(self.rows), _AT_ONCE):
            yield from map(Asked._make, self.rows[start : start + _AT_ONCE].tolist())

    @property
    def rate(self) -> float | None:
        """Requests per second; None if all come at once."""
        span = float(self.rows["arrival"][-1] - self.rows["arrival"][0])
        return (len(self) - 1) / span if span > 0 else None

    @property
    def prompt_tokens(self) -> NDArray[np.int64]:
        lengths = np.array([*map(len, self.prefixes), 0], dtype=np.int64)  # group -1 is the last
        own: NDArray[np.int64] = self.rows["own_tokens"] + lengths[self.rows["group"]]
        return own

    def prompt(self, number: int, asked: Asked) -> Sequence[int]:
        """Token ids. Those that nobody else has are the request's number, again and again, behind
        the ids of prefixes."""
        if self.given is not None:
            return self.given[number]
        own = [len(self.prefixes) + number] * asked.own_tokens
        return own if asked.group < 0 else [*self.prefixes[asked.group], *own]

    def at_once(self, requests: int) -> Load:
        """The first requests, none of which has to be waited for."""
        rows = self.rows[:requests].copy()
        rows["arrival"] = 0.0
        return replace(self, rows=rows)


@dataclass(frozen=True)
class Mix:
    """What random requests are like, but for when they come."""

    lengths: LengthSource
    tenants: int = 1
    """Who send them: the second half as much as the first, the third a third as much, and so on."""
    priorities: int = 1
    """Levels, from 0 on, each as frequent as any other."""
    prefix_tokens: int = 0  # that prompts begin with, on top of their length
    prefix_groups: int = 1  # prefixes, each as frequent as any other
    prefix_share: float = 1.0  # of the requests that begin with one


@dataclass(frozen=True)
class UniformLengths:
    """Implements `LengthSource`: any length between two is as frequent as any other."""

    prompt_tokens: Span
    output_tokens: Span

    @property
    def name(self) -> str:
        (low, high), (least, most) = self.prompt_tokens, self.output_tokens
        return f"{low} to {high} prompt and {least} to {most} output tokens"

    def lengths(self, count: int, random: Random) -> list[Lengths]:
        return [
            Lengths(random.randint(*self.prompt_tokens), random.randint(*self.output_tokens))
            for _ in range(count)
        ]


def random_load(mix: Mix, requests: int, seed: int) -> Load:
    """``requests`` requests, all there at once; see `with_arrivals`."""
    rows = np.zeros(requests, dtype=ROW)
    random = Random(f"{seed} {mix.lengths.name} lengths")
    for start in range(0, requests, _AT_ONCE):
        part = rows[start : start + _AT_ONCE]
        drawn = mix.lengths.lengths(len(part), random)
        part["own_tokens"], part["output_tokens"] = np.array(drawn, dtype="i4").T
    draw = np.random.default_rng([seed, 1])
    demand = 1 / np.arange(1, mix.tenants + 1)
    rows["tenant"] = draw.choice(mix.tenants, size=requests, p=demand / demand.sum())
    rows["priority"] = draw.integers(mix.priorities, size=requests)
    rows["group"] = -1
    prefixes: list[list[int]] = []
    if mix.prefix_tokens:
        prefixes = [[group] * mix.prefix_tokens for group in range(mix.prefix_groups)]
        groups = draw.integers(mix.prefix_groups, size=requests)
        rows["group"] = np.where(draw.random(requests) < mix.prefix_share, groups, -1)
    names = [f"tenant-{number}" for number in range(mix.tenants)]
    return Load(mix.lengths.name, rows, names, prefixes)


def with_arrivals(load: Load, rate: float, burstiness: float, seed: int) -> Load:
    """The load with arrivals at ``rate`` requests per second on average. The times between them
    are of a gamma distribution whose shape is ``burstiness``: 1 is a Poisson process, less comes
    in bursts."""
    for what, value in (("rate", rate), ("burstiness", burstiness)):
        if not 0 < value < math.inf:
            raise PageloomError(f"the {what} is {value}, but must be above 0")
    draw = np.random.default_rng([seed, 2])
    rows = load.rows.copy()
    gaps = draw.gamma(burstiness, 1 / (burstiness * rate), size=len(rows))
    rows["arrival"] = np.cumsum(gaps)
    return replace(load, rows=rows)


def trace_load(trace: Trace, path: Path) -> Load:
    """A trace as `pageloom.bench.serving.trace.read_trace` has it. Raises `PageloomError` for
    prompts of text, since there is no tokenizer."""
    rows = np.zeros(len(trace), dtype=ROW)
    tenants: dict[str, int] = {}
    given: list[Sequence[int]] = []
    for number, request in enumerate(trace):
        if isinstance(request.prompt, str):
            raise PageloomError(
                f"{path} has a prompt of text ({request.prompt[:20]!r}...), and a simulation has "
                "no tokenizer; give prompt_tokens, or token ids as prompt"
            )
        wanted = request.random_prompt
        prompt = request.prompt if wanted is None else (-1 - number,) * wanted.tokens
        tenant = tenants.setdefault(request.user, len(tenants))
        rows[number] = (
            request.arrival, len(prompt), request.output_tokens, -1, tenant, request.priority
        )  # fmt: skip
        given.append(prompt)
    return Load(str(path), rows, list(tenants), given=given)
