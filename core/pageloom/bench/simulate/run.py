"""Simulations in as many processes as there is work for."""

from __future__ import annotations

import gc
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pageloom.bench.simulate.cluster import simulate
from pageloom.bench.simulate.load import Load
from pageloom.bench.simulate.meter import Measured
from pageloom.bench.simulate.routing import ROUTERS
from pageloom.bench.simulate.settings import Settings

POLL_SECONDS = 0.5
COLLECTED_AT = 100_000  # objects; some 20 MB
PROBE_REQUESTS = 2000
PROBE_SHARE = 0.8


@dataclass(frozen=True)
class Cluster:
    """What all settings are simulated as."""

    replicas: int = 1
    routing: str = "round_robin"
    window: float = 60.0  # seconds, over which tenants' shares are compared


@dataclass(frozen=True)
class Outcome:
    """What came of the whole load with one of the settings."""

    settings: Settings
    measured: Measured
    took: float  # seconds of real time that its processes computed, summed


def sustained_rate(settings: Settings, load: Load, cluster: Cluster) -> float:
    """Requests per second that keep the replicas busy, but not too busy: `PROBE_SHARE` of what one
    of them serves if the first requests of the load come all at once, times their number."""
    few = load.at_once(min(PROBE_REQUESTS, len(load)))
    measured = simulate(replace(settings, max_waiting=None), few)
    if not measured.ended:
        return float(len(few))  # steps take no time
    return PROBE_SHARE * cluster.replicas * len(few) / measured.ended


def run_all(
    everything: Sequence[Settings],
    load: Load,
    cluster: Cluster,
    processes: int,
    on_progress: Callable[[Sequence[int]], None] = lambda arrived: None,
) -> list[Outcome]:
    """Serve the load with each of the settings, in that order.

    ``on_progress`` is told now and then how many requests have arrived by setting. Replicas that
    have nothing to do with each other are spread over processes too. Raises `PageloomError`.
    """
    parts = 1
    if ROUTERS[cluster.routing].independent:
        parts = max(1, min(processes // len(everything), cluster.replicas))
    tasks = [
        _Task(settings, cluster, part, parts) for settings in everything for part in range(parts)
    ]
    if processes == 1 or len(tasks) == 1:
        done = _run_here(tasks, load, on_progress)
    else:
        done = _run_apart(tasks, load, min(processes, len(tasks)), on_progress)
    outcomes = []
    for index, settings in enumerate(everything):
        mine = done[index * parts : (index + 1) * parts]
        measured = Measured.merge([measured for measured, _ in mine])
        outcomes.append(Outcome(settings, measured, sum(took for _, took in mine)))
    return outcomes


@dataclass(frozen=True)
class _Task:
    settings: Settings
    cluster: Cluster
    part: int
    parts: int

    def run(self, load: Load, on_arrivals: Callable[[int], None]) -> tuple[Measured, float]:
        start = time.perf_counter()
        with _rare_collections():
            measured = simulate(
                self.settings,
                load,
                replicas=self.cluster.replicas,
                routing=self.cluster.routing,
                window=self.cluster.window,
                part=self.part,
                parts=self.parts,
                on_arrivals=on_arrivals,
            )
        return measured, time.perf_counter() - start


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Nearly all that a simulation makes is freed by its reference count. What is left are some
    objects for each request that ended; to look for them all the time takes a third of it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(COLLECTED_AT, 20, 20)
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)


def _run_here(
    tasks: Sequence[_Task], load: Load, on_progress: Callable[[Sequence[int]], None]
) -> list[tuple[Measured, float]]:
    arrived = [0] * len(tasks)
    done = []
    for index, task in enumerate(tasks):

        def count(arrivals: int, index: int = index) -> None:
            arrived[index] += arrivals
            on_progress(arrived)

        done.append(task.run(load, count))
    return done


def _run_apart(
    tasks: Sequence[_Task],
    load: Load,
    processes: int,
    on_progress: Callable[[Sequence[int]], None],
) -> list[tuple[Measured, float]]:
    context = multiprocessing.get_context("spawn")
    parts = tasks[0].parts
    arrived: Any = context.Array("q", len(tasks), lock=False)
    with tempfile.TemporaryDirectory(prefix="pageloom-simulate-") as folder:
        rows = Path(folder) / "load.npy"
        np.save(rows, load.rows)  # mapped by all processes, and so in memory once
        pool = ProcessPoolExecutor(
            processes,
            mp_context=context,
            initializer=_prepare,
            initargs=(replace(load, rows=load.rows[:0]), rows, arrived),
        )
        try:
            futures = [pool.submit(_run_in_process, i, task) for i, task in enumerate(tasks)]
            todo: set[Future[tuple[Measured, float]]] = set(futures)
            while todo:
                finished, todo = wait(todo, POLL_SECONDS)
                by_setting = np.array(arrived[:]).reshape(-1, parts).min(axis=1)
                on_progress(by_setting.tolist())
                for future in finished:
                    future.result()  # raises what it raised, before the others are done
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


_here: dict[str, Any] = {}  # of a process: what all of its tasks share


def _prepare(load: Load, rows: Path, arrived: Any) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _here["load"] = replace(load, rows=np.load(rows, mmap_mode="r"))
    _here["arrived"] = arrived
    gc.collect()
    gc.freeze()  # what was imported is here to stay


def _end_with_parent() -> None:
    """A pool whose owner was killed goes on, and then waits for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_process(index: int, task: _Task) -> tuple[Measured, float]:
    def count(arrivals: int) -> None:
        _here["arrived"][index] += arrivals

    return task.run(_here["load"], count)
