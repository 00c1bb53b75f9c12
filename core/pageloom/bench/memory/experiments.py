"""Everything that the bench runs, one simulation after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import NamedTuple

from pageloom.bench import workload
from pageloom.bench.memory import paper
from pageloom.bench.memory.contiguous import RESERVATIONS, ContiguousSystem
from pageloom.bench.memory.paged import PagedSystem
from pageloom.bench.memory.serve import serve
from pageloom.bench.memory.served import KV_SLOTS, StepTime
from pageloom.bench.memory.settings import Settings
from pageloom.bench.memory.sharing import REPEATS_AFTER, Saving, measure_saving
from pageloom.bench.memory.usage import Measured
from pageloom.bench.workload import LengthSource, poisson_arrivals

SOURCES: Mapping[str, LengthSource] = {
    source.name: source for source in (workload.SHAREGPT, workload.ALPACA)
}


class Window(NamedTuple):
    """Seconds of simulated time."""

    warm_up: float  # at first the memory fills
    measured: float


# An hour in the paper. Here each serves some 400,000 output tokens.
SERVING = {paper.SHAREGPT: Window(120, 600), paper.ALPACA: Window(40, 260)}
SHARING_REQUESTS: Mapping[paper.Method, Mapping[str, int]] = {
    "parallel sampling": {paper.SHAREGPT: 128, paper.ALPACA: 640},
    "beam search": {paper.SHAREGPT: 64, paper.ALPACA: 192},
}

BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OVERLOAD = 4.0  # times the rates of figure 13: memory is full whatever the block size
OVERLOADED = {paper.SHAREGPT: Window(20, 80), paper.ALPACA: Window(8, 24)}

EARLIER = 60  # another length after which text repeats itself, to show what depends on it


class Sharing(NamedTuple):
    workload: str
    method: paper.Method
    width: int
    repeats_after: int = REPEATS_AFTER  # tokens; for beam search


@dataclass
class Results:
    sources: Mapping[str, LengthSource]
    serving: dict[tuple[str, str], Measured] = field(default_factory=dict)  # by workload, system
    saved: dict[Sharing, Saving] = field(default_factory=dict)
    block_sizes: dict[tuple[str, int], Measured] = field(default_factory=dict)  # by workload, size


class Run(NamedTuple):
    name: str
    run: Callable[[], None]


def runs(settings: Settings, results: Results, scale: float) -> list[Run]:
    """The simulations, each of which adds to ``results``.

    ``scale`` multiplies how much each of them measures.
    """
    return [
        *_serving_runs(settings, results, scale),
        *_sharing_runs(settings, results, scale),
        *_block_size_runs(settings, results, scale),
    ]


def _serving_runs(settings: Settings, results: Results, scale: float) -> Iterator[Run]:
    def run(source: LengthSource, system: str) -> None:
        rate, window = paper.REQUEST_RATES[source.name], SERVING[source.name]
        results.serving[source.name, system] = _serve(settings, source, system, rate, window, scale)

    for source in results.sources.values():
        for system in paper.SYSTEMS:
            yield Run(f"{source.name}, {system}", partial(run, source, system))


def _sharing_runs(settings: Settings, results: Results, scale: float) -> Iterator[Run]:
    def run(key: Sharing) -> None:
        source, seed = results.sources[key.workload], settings.seed
        count = max(1, round(SHARING_REQUESTS[key.method][source.name] * scale))
        lengths = source.lengths(count, Random(f"{seed} {source.name} sharing"))
        results.saved[key] = measure_saving(
            settings, lengths, key.method, key.width, key.repeats_after
        )

    for name, method in paper.SAVED:
        for width in paper.WIDTHS:
            yield Run(f"{name}, {method}, {width}", partial(run, Sharing(name, method, width)))
    for name in results.sources:
        key = Sharing(name, "beam search", max(paper.WIDTHS), EARLIER)
        yield Run(f"{name}, beam search, early repetition", partial(run, key))


def _block_size_runs(settings: Settings, results: Results, scale: float) -> Iterator[Run]:
    def run(source: LengthSource, size: int) -> None:
        rate, window = paper.REQUEST_RATES[source.name] * OVERLOAD, OVERLOADED[source.name]
        results.block_sizes[source.name, size] = _serve(
            settings.with_block_size(size), source, paper.PAGED, rate, window, scale
        )

    for source in results.sources.values():
        for size in BLOCK_SIZES:
            yield Run(f"{source.name}, block size {size}", partial(run, source, size))


def _serve(
    settings: Settings,
    source: LengthSource,
    system: str,
    rate: float,
    window: Window,
    scale: float,
) -> Measured:
    stop = window.warm_up + window.measured * scale
    return serve(
        PagedSystem(settings)
        if system == paper.PAGED
        else ContiguousSystem(KV_SLOTS, RESERVATIONS[system], settings.max_num_seqs),
        poisson_arrivals(source, rate, stop, settings.seed),
        StepTime(),
        start=window.warm_up,
        stop=stop,
    )
