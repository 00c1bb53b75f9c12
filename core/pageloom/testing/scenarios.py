"""Requests that come and go, for the control plane, and how they are played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any
from zlib import crc32

from hypothesis import strategies as st

from pageloom.contract import Scheduler
from pageloom.memory import blocks_for_branches
from pageloom.scheduling import Branch, Request, SamplingParams
from pageloom.scheduling.simulation import SimulatedStep, Simulation
from pageloom.testing.kv_invariants import KVInvariants

EOS = 0


@dataclass(frozen=True)
class Arrival:
    """A request of a scenario."""

    step: int = 0  # when it comes
    prompt: int = 8  # tokens
    output: int = 8  # tokens, most
    family: int | None = None  # the first halves of prompts of one family are alike
    ignore_eos: bool = False
    n: int = 1
    beam_width: int | None = None
    priority: int = 0
    user: str = ""  # may have the request's name in it, as {}
    abort_after: int | None = None  # steps

    @property
    def abort_step(self) -> int | None:
        return None if self.abort_after is None else self.step + self.abort_after

    @property
    def seats(self) -> int:
        return max(self.n, self.beam_width or 1)

    def most_blocks(self, block_size: int) -> int:
        """Blocks that it may hold; branches share the full ones of the prompt."""
        total = self.prompt + self.output - 1
        return blocks_for_branches(self.seats, self.prompt, total, block_size)

    def request(self, name: str, now: float) -> Request:
        alike = 0 if self.family is None else self.prompt // 2
        own = crc32(name.encode())
        return Request(
            name,
            [self.family or 0] * alike + [(own + i) % 1000 for i in range(alike, self.prompt)],
            SamplingParams(
                max_tokens=self.output,
                ignore_eos=self.ignore_eos,
                n=self.n,
                beam_width=self.beam_width,
            ),
            arrival_time=now,
            eos_token_ids=frozenset([EOS]),
            priority=self.priority,
            user=self.user.format(name),
        )


@dataclass(frozen=True)
class Scenario:
    limits: Mapping[str, Any]  # of `Simulation`
    arrivals: tuple[Arrival, ...]


class WatchedSimulation(Simulation):
    """A `Simulation` on a clock that gains a second in each step, with `KVInvariants` watching,
    where one token in eight ends its branch."""

    def __init__(self, scheduler: Scheduler, **limits: Any) -> None:
        self.now = 0.0
        super().__init__(scheduler, clock=lambda: self.now, **limits)
        KVInvariants(self.planner).watch()

    def draw(self, branch: Branch, num_tokens: int) -> list[int]:
        return [token if token % 8 else EOS for token in super().draw(branch, num_tokens)]

    def step(self) -> SimulatedStep:
        self.now += 1.0
        return super().step()

    def check_empty(self) -> None:
        """Raise `AssertionError` unless every request ended and every block is free."""
        planner = self.planner
        left = [*planner.running, *planner.waiting]
        used = [pool.num_used for pool in (planner.pool, planner.host) if pool is not None]
        if left or any(used):
            raise AssertionError(f"requests {left} are open, {used} blocks are in use")


@st.composite
def scenarios(draw: st.DrawFn, aborts: bool = False) -> Scenario:
    """Up to a dozen requests of every kind, and an engine with little more room than the largest
    of them needs."""
    given: dict[str, Any] = {
        "step": st.integers(0, 6),
        "prompt": st.integers(1, 20),
        "output": st.integers(1, 28),
        "family": st.sampled_from([None, 1, 2]),
        "ignore_eos": st.booleans(),
        "priority": st.integers(-2, 2),
        "user": st.sampled_from(["", "a", "b"]),
        "abort_after": st.none() | st.integers(1, 12) if aborts else st.none(),
    }
    sampled = st.builds(Arrival, n=st.sampled_from([1, 1, 2, 4]), **given)
    searched = st.builds(Arrival, beam_width=st.integers(2, 3), **given)
    arrivals = draw(st.lists(sampled | sampled | searched, min_size=2, max_size=12))
    seats = max(arrival.seats for arrival in arrivals)
    block_size = draw(st.sampled_from([1, 4, 16]))
    chunked = draw(st.booleans())
    limits = {
        "num_blocks": max(a.most_blocks(block_size) for a in arrivals) + draw(st.integers(0, 4)),
        "block_size": block_size,
        "max_num_seqs": seats + draw(st.integers(0, 8)),
        "max_num_batched_tokens": (seats if chunked else 48) + draw(st.integers(0, 24)),
        "max_model_len": 48,
        "enable_chunked_prefill": chunked,
        "enable_prefix_caching": draw(st.booleans()),
        "preemption_mode": draw(st.sampled_from(["auto", "recompute", "swap"])),
        "host_blocks": draw(st.sampled_from([0, 4, 40])),
        "steps_in_flight": draw(st.sampled_from([1, 1, 2, 3])),
    }
    return Scenario(limits, tuple(sorted(arrivals, key=lambda arrival: arrival.step)))


def play(scheduler: Scheduler, scenario: Scenario) -> Iterator[SimulatedStep]:
    """Run a scenario to its end.

    Raises `AssertionError` if it takes ten times as many steps as there are tokens.
    """
    simulation = WatchedSimulation(scheduler, **scenario.limits)
    planner = simulation.planner
    tokens = sum(a.prompt + a.seats * a.output for a in scenario.arrivals)
    last = scenario.arrivals[-1].step + 10 * tokens
    for number in count():
        for index, arrival in enumerate(scenario.arrivals):
            name = f"request-{index}"
            if arrival.step == number:
                simulation.add(arrival.request(name, simulation.now))
            if arrival.abort_step == number and name in planner:
                planner.finish(planner.running.get(name) or planner.waiting[name], "abort")
        if planner.has_requests:
            if number > last:
                left = [*planner.running, *planner.waiting]
                raise AssertionError(f"after {number} steps, {left} have not ended")
            yield simulation.step()
        elif number > scenario.arrivals[-1].step:
            break
    simulation.check_empty()
