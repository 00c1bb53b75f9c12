"""The same trace for real and simulated: how far are the simulated times off?"""

from __future__ import annotations

import gc
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median

import numpy as np

from pageloom.bench.serving.replay import Client
from pageloom.bench.serving.trace import Trace
from pageloom.bench.simulate.cluster import simulate
from pageloom.bench.simulate.load import trace_load
from pageloom.bench.simulate.meter import Measured
from pageloom.bench.simulate.settings import Settings
from pageloom.contract import RequestRecord, hookimpl
from pageloom.engine.engine import Engine


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A number as it was simulated, and as it was measured in each round."""

    name: str
    simulated: float
    measured: Sequence[float]

    @property
    def ratio(self) -> float:
        """Simulated by measured, the median over rounds."""
        return self.simulated / median(self.measured)

    @property
    def range(self) -> tuple[float, float]:
        """The least and the greatest ratio of a round."""
        return self.simulated / max(self.measured), self.simulated / min(self.measured)


class Clock(ABC):
    """By which an engine is measured."""

    @abstractmethod
    def now(self) -> float:
        """Seconds. Never goes back."""

    @abstractmethod
    def wait(self, seconds: float) -> None: ...


class WallClock(Clock):
    def now(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)


class CPUClock(Clock):
    """The processor time of this process, and what it waited without passing any. On a machine
    that others use too, this is what an engine of one thread would take alone, about."""

    def __init__(self) -> None:
        self._waited = 0.0

    def now(self) -> float:
        return self._waited + time.process_time()

    def wait(self, seconds: float) -> None:
        self._waited += seconds


class Replayer:
    """Sends traces to one engine, by any clock. Observes it for good: make one per engine."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self.clock = clock
        self._client = Client(engine)
        self._records: list[RequestRecord] = []
        engine.planner.clock = clock.now
        engine.plugins.register_observer(self)

    @hookimpl
    def request_finished(self, record: RequestRecord) -> None:
        self._records.append(record)

    def replay(self, trace: Trace) -> dict[str, float]:
        """Open each request when it arrives, and step until all are done; the engine is idle."""
        engine, clock, arrivals = self.engine, self.clock, dict[str, float]()
        self._records.clear()
        start = clock.now()
        while len(arrivals) < len(trace) or engine.has_requests:
            now = clock.now() - start
            while len(arrivals) < len(trace) and trace[len(arrivals)].arrival <= now:
                request = trace[len(arrivals)]
                name = f"replayed-{len(arrivals)}"
                self._client.open(request, name)
                arrivals[name] = start + request.arrival
            if engine.has_requests:
                engine.advance()
            else:
                clock.wait(trace[len(arrivals)].arrival - now)
        outputs = sum(record.output_tokens for record in self._records)
        done = [(r, arrivals[r.request_id], r.first_token or 0.0) for r in self._records]
        return _named(
            outputs / (clock.now() - start),
            [first - arrived for _, arrived, first in done],
            [
                (record.finished - first) / (record.output_tokens - 1)
                for record, _, first in done
                if record.output_tokens > 1
            ],
            [record.finished - arrived for record, arrived, _ in done],
        )


def compare(
    replayer: Replayer,
    settings: Settings,
    trace: Trace,
    rounds: int,
    on_round: Callable[[int], None] = lambda number: None,
) -> list[Accuracy]:
    """Serve a trace of token ids ``rounds`` times, and simulate it once. ``settings`` are of the
    replayer's engine. ``on_round`` is told the number of each round before it begins."""
    load = trace_load(trace, Path("the trace"))
    simulated = _of_simulation(simulate(replace(settings, max_waiting=None), load))
    measured = []
    for number in range(rounds):
        on_round(number)
        replayer.engine.reset_prefix_cache()
        gc.collect()
        measured.append(replayer.replay(trace))
    return [Accuracy(name, simulated[name], [one[name] for one in measured]) for name in simulated]


def _of_simulation(done: Measured) -> dict[str, float]:
    tpot = done.tpot[~np.isnan(done.tpot)]
    return _named(
        done.counts["output_tokens"] / done.ended,
        done.ttft.tolist(),
        tpot.tolist(),
        done.e2e.tolist(),
    )


def _named(
    rate: float, ttft: Sequence[float], tpot: Sequence[float], e2e: Sequence[float]
) -> dict[str, float]:
    return {
        "output tokens/s": rate,
        "TTFT mean, s": fmean(ttft),
        "TTFT p50, s": float(np.percentile(ttft, 50)),
        "TTFT p90, s": float(np.percentile(ttft, 90)),
        "TPOT mean, s": fmean(tpot),
        "end to end mean, s": fmean(e2e),
    }
