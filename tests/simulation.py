"""Simulations of the control plane as tests want them."""

from __future__ import annotations

from typing import Any

from pageloom.contract import Scheduler
from pageloom.scheduling import Branch, Request, SamplingParams
from pageloom.scheduling.simulation import Simulation


class Ones(Simulation):
    """Every sampled token is 1."""

    def draw(self, branch: Branch, count: int) -> list[int]:
        return [1] * count


def simulate(scheduler: Scheduler, **limits: Any) -> Simulation:
    """`Ones`, on a clock that counts its own readings."""
    ticks = iter(range(1 << 62))
    return Ones(scheduler, clock=lambda: float(next(ticks)), **limits)


def make_request(
    name: object, prompt: int, output: int | None, arrival: float = 0.0, **kwargs: Any
) -> Request:
    params = SamplingParams(max_tokens=output, temperature=0.0)
    return Request(str(name), [0] * prompt, params, arrival_time=arrival, **kwargs)
