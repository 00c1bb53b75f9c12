"""A backend that became slower is told from a machine that did."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from attention_bench import make_case

from pageloom.bench.attention import regressions
from pageloom.bench.attention.results import Entry, Run
from pageloom.bench.statistics import MIN_ROUNDS, unpaired_ratio
from pageloom.errors import PageloomError


def make_run(seed, slower=1.0, machine=1.0, rounds=8, name="cpu", backend="mine"):
    """``machine`` times as slow a machine, and on it a backend ``slower`` than it should be."""
    draw = np.random.default_rng(seed)
    drift = machine * np.exp(draw.normal(0, 0.1, rounds))
    noise = np.exp(draw.normal(0, 0.02, rounds))
    entry = Entry(
        make_case(), backend, "test 1", False, 2, 1e6, 4e6, 0.1, False,
        plan=1e-6 * drift,
        forward=4e-4 * drift * noise * slower,
        read=1e10 / drift,
        copy=8e9 / drift,
        matrix=1e11 / drift,
    )  # fmt: skip
    return Run([entry], [], [], name, "2026-01-01")


def compare(now, then, margin=0.1):
    return regressions.compare(now, then, margin, "old.json")


def test_a_slower_backend_is_a_regression():
    changes = compare(make_run(1, slower=1.4), make_run(2))
    assert [change.verdict for change in changes.changes] == ["slower"]
    assert changes.regressions
    assert not compare(make_run(1, slower=1.4), make_run(2), margin=0.6).regressions


def test_a_slower_machine_is_none():
    changes = compare(make_run(1, machine=3.0), make_run(2))
    assert [change.verdict for change in changes.changes] == ["within noise"]


def test_a_faster_backend_is_none():
    changes = compare(make_run(1, slower=0.5), make_run(2))
    assert [change.verdict for change in changes.changes] == ["faster"]
    assert not changes.regressions


def test_noise_raises_few_alarms():
    alarms = sum(bool(compare(make_run(i), make_run(i + 100)).regressions) for i in range(60))
    assert alarms <= 1


def test_it_says_what_it_cannot_compare():
    changes = compare(make_run(1, name="another"), make_run(2))
    assert any("another machine" in note for note in regressions.change_notes(changes))
    unknown = compare(make_run(1), make_run(2, name=""))
    assert not any("another machine" in note for note in regressions.change_notes(unknown))
    then = make_run(2)
    then = replace(then, entries=[*then.entries, *make_run(3, backend="gone").entries])
    notes = list(regressions.change_notes(compare(make_run(1), then)))
    assert any("gone in decode" in note for note in notes)
    with pytest.raises(PageloomError, match="in common"):
        compare(make_run(1), make_run(2, backend="other"))
    with pytest.raises(PageloomError, match="one of them has 5"):
        compare(make_run(1), make_run(2, rounds=MIN_ROUNDS - 1))


def test_the_interval_of_unpaired_rounds_covers_the_truth():
    draw = np.random.default_rng(0)
    covered = 0
    for seed in range(80):
        mine, theirs = np.exp(draw.normal(0, 0.1, (2, 10)))
        ratio = unpaired_ratio(3 * mine, theirs, seed)
        covered += ratio.low <= 3 <= ratio.high
    assert covered >= 68  # 0.95 is 76 of 80; fewer than 68 has a probability below 0.001
    with pytest.raises(ValueError, match="6 are needed"):
        unpaired_ratio([1.0] * 5, [1.0] * 8)
