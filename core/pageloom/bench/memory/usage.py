"""Where the slots of KV memory are at a moment, and what that comes to over a time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import stdev
from typing import NamedTuple

from pageloom.memory import IntegrityError


class Usage(NamedTuple):
    """Slots (room for one token each) by what they are used for; section 3.1 of the paper.

    Together they are the whole KV memory. Figure 2 shows the last two as one.
    """

    token_states: int  # hold the KV of a token
    reserved: int  # kept for tokens that a running request will get
    internal: int  # kept for tokens that it will never get, or the rest of its last block
    rounding: int  # added by the allocator, which hands out powers of two
    free: int  # in nobody's hands: between the regions, or not needed


class Iteration(NamedTuple):
    """What one step of a serving system did."""

    usage: Usage
    requests: int  # batched
    prefills: int  # of them
    tokens: int  # computed
    waiting: int  # requests in the queue


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over a time, and its standard error by the method of batch means."""

    mean: float
    error: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One system under one load. Memory is averaged over time, requests over iterations."""

    shares: dict[str, Estimate]  # of the KV memory: by the fields of `Usage`, and `EXTERNAL`
    requests: Estimate  # batched
    requests_apart: float  # batched, had prefills run in iterations of their own
    waiting: float  # share of the time in which requests waited
    step_seconds: float  # mean


EXTERNAL = "external_and_others"  # rounding and free
BATCHES = 10  # of time


class _Mean:
    """A weighted mean, and those of the batches."""

    def __init__(self) -> None:
        self._totals = [0.0] * BATCHES
        self._weights = [0.0] * BATCHES

    def add(self, batch: int, value: float, weight: float) -> None:
        self._totals[batch] += value * weight
        self._weights[batch] += weight

    @property
    def value(self) -> float:
        return sum(self._totals) / sum(self._weights)

    def estimate(self) -> Estimate:
        means = [t / w for t, w in zip(self._totals, self._weights, strict=True) if w]
        error = stdev(means) / math.sqrt(len(means)) if len(means) > 1 else math.inf
        return Estimate(self.value, error)


class Meter:
    """Averages the iterations that begin from ``start`` on and before ``stop`` seconds."""

    def __init__(self, total: int, start: float, stop: float) -> None:
        self._total, self._start, self._stop = total, start, stop
        self._shares = {name: _Mean() for name in (*Usage._fields, EXTERNAL)}
        self._requests, self._requests_apart = _Mean(), _Mean()
        self._waiting, self._seconds = _Mean(), _Mean()

    def add(self, now: float, seconds: float, iteration: Iteration) -> None:
        """Raises `IntegrityError` if the parts are not the whole."""
        usage, requests, prefills = iteration.usage, iteration.requests, iteration.prefills
        if sum(usage) != self._total:
            raise IntegrityError(f"{usage} are not {self._total} slots")
        if not self._start <= now < self._stop:
            return
        batch = int((now - self._start) / (self._stop - self._start) * BATCHES)
        slots = {**usage._asdict(), EXTERNAL: usage.rounding + usage.free}
        for name, share in self._shares.items():
            share.add(batch, slots[name] / self._total, seconds)
        self._waiting.add(batch, iteration.waiting > 0, seconds)
        if requests:
            self._requests.add(batch, requests, 1)
            self._seconds.add(batch, seconds, 1)
            apart = (prefills > 0) + (prefills < requests)  # iterations
            self._requests_apart.add(batch, requests / apart, apart)

    def result(self) -> Measured:
        return Measured(
            {name: share.estimate() for name, share in self._shares.items()},
            self._requests.estimate(),
            requests_apart=self._requests_apart.value,
            waiting=self._waiting.value,
            step_seconds=self._seconds.value,
        )
