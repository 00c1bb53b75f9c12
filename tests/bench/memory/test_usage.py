"""The meter: what it averages, and what it refuses."""

from __future__ import annotations

import pytest

from pageloom.bench.memory.usage import EXTERNAL, Iteration, Meter, Usage
from pageloom.memory import IntegrityError


def iteration(*slots, requests=4, prefills=0, waiting=0):
    return Iteration(Usage(*slots), requests, prefills, tokens=requests, waiting=waiting)


def test_memory_is_averaged_over_time_and_requests_over_iterations():
    meter = Meter(10, start=0, stop=10)
    meter.add(0.0, 1.0, iteration(2, 3, 1, 3, 1, requests=2, waiting=5))
    meter.add(5.0, 4.0, iteration(7, 0, 3, 0, 0, requests=4))
    measured = meter.result()
    assert {name: share.mean for name, share in measured.shares.items()} == pytest.approx(
        {
            "token_states": 0.6,
            "reserved": 0.06,
            "internal": 0.26,
            "rounding": 0.06,
            "free": 0.02,
            EXTERNAL: 0.08,
        }
    )
    assert measured.requests.mean == 3
    assert measured.requests.error == pytest.approx(1)  # of the mean of 2 and 4
    assert measured.waiting == 0.2
    assert measured.step_seconds == 2.5


def test_prefills_in_iterations_of_their_own():
    meter = Meter(10, start=0, stop=10)
    meter.add(0.0, 1.0, iteration(10, 0, 0, 0, 0, requests=9, prefills=1))  # 1 and 8
    meter.add(5.0, 1.0, iteration(10, 0, 0, 0, 0, requests=9))
    meter.add(6.0, 1.0, iteration(10, 0, 0, 0, 0, requests=2, prefills=2))
    assert meter.result().requests_apart == pytest.approx((1 + 8 + 9 + 2) / 4)


def test_what_begins_outside_the_window_does_not_count():
    meter = Meter(10, start=2, stop=4)
    for now in (0.0, 1.9, 2.0, 3.9, 4.0):
        inside = 2 <= now < 4
        meter.add(now, 1.0, iteration(10 * inside, 0, 0, 0, 10 - 10 * inside))
    assert meter.result().shares["token_states"].mean == 1


def test_parts_that_are_not_the_whole_are_a_fault():
    with pytest.raises(IntegrityError, match="are not 10 slots"):
        Meter(10, start=0, stop=1).add(0.0, 1.0, iteration(2, 3, 1, 3, 2))
