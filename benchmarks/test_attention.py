"""The attention backends of this machine in pytest-benchmark's hands.

    pytest benchmarks/test_attention.py --benchmark-enable --benchmark-json FILE

runs what ``pageloom bench attention configs/bench/attention.yaml --json FILE`` runs, which has
more to say about it; ``PAGELOOM_BENCH_ATTENTION`` names another matrix. What a backend refuses is
skipped with its reason, what it computes wrongly fails.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import product
from pathlib import Path

import pytest

from pageloom.bench.attention.matrix import load_matrix
from pageloom.bench.attention.results import extra_info, seconds_of
from pageloom.bench.attention.run import MatrixRun

DEFAULT = Path(__file__).parents[1] / "configs" / "bench" / "attention.yaml"


class Playback:
    """A clock that shows what was measured before.

    pytest-benchmark finishes one test before it begins the next. On a machine whose speed drifts
    that favors some backends over others, so that the first test of a case times all of them in
    turn, and each test then hands its samples to pytest-benchmark.
    """

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now = seconds


CLOCK = Playback()


@cache
def matrix_run(timed):
    path = os.environ.get("PAGELOOM_BENCH_ATTENTION", str(DEFAULT))
    return MatrixRun(load_matrix(path, [] if timed else ["rounds=1"]))


@cache
def result_of(case, timed):
    run = matrix_run(timed)
    return run.run(next(each for each in run.matrix.cases if each.id == case))


def pytest_generate_tests(metafunc):
    run = matrix_run(metafunc.config.getoption("benchmark_enable"))
    cases = [case.id for case in run.matrix.cases]
    backends = [candidate.name for candidate in run.candidates]
    metafunc.parametrize(("case", "backend"), list(product(cases, backends)))


@pytest.mark.benchmark(timer=CLOCK)
def test_attention(case, backend, benchmark):
    result = result_of(case, benchmark.enabled)
    if reason := result.refused.get(backend):
        pytest.skip(f"{backend} {reason}")
    if reason := result.failed.get(backend):
        pytest.fail(f"{backend} {reason}")
    measured = next(each for each in result.measured if each.candidate.name == backend)
    samples = iter(seconds_of(result, measured))

    def rewind():
        CLOCK.now = 0.0

    benchmark.group = case
    benchmark.extra_info |= extra_info(result, measured)
    benchmark.pedantic(
        lambda: CLOCK.advance(next(samples)), setup=rewind, rounds=len(measured.forward)
    )
