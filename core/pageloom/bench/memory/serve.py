"""Time passes: requests arrive, a system runs step after step, and its memory is metered."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pageloom.bench.memory.served import StepTime
from pageloom.bench.memory.usage import Iteration, Measured, Meter
from pageloom.bench.workload import Arrival


class System(Protocol):
    """Something that serves requests, one step at a time."""

    slots: int  # of KV memory

    @property
    def busy(self) -> bool:
        """Whether any request is running or waiting."""

    def add(self, arrival: Arrival) -> None: ...

    def step(self, now: float) -> Iteration:
        """Run a step that begins at ``now`` seconds. What it did includes requests that end."""


def serve(
    system: System,
    arrivals: Sequence[Arrival],
    step_time: StepTime,
    *,
    start: float,
    stop: float,
) -> Measured:
    """Let ``system`` serve ``arrivals`` until ``stop`` seconds, and measure from ``start`` on."""
    meter = Meter(system.slots, start, stop)
    now, upcoming = 0.0, 0
    while now < stop:
        while upcoming < len(arrivals) and arrivals[upcoming].time <= now:
            system.add(arrivals[upcoming])
            upcoming += 1
        iteration = system.step(now)
        if system.busy or iteration.requests:
            kv_tokens = iteration.usage.token_states
            seconds = step_time.seconds(iteration.requests, iteration.tokens, kv_tokens)
        else:
            seconds = (arrivals[upcoming].time if upcoming < len(arrivals) else stop) - now
        meter.add(now, seconds, iteration)
        now += seconds
    return meter.result()
