"""Priorities: who is served first, who gives way, and that waiting counts."""

from __future__ import annotations

import math

import pytest

from pageloom.config import ConfigError, build_options
from pageloom.scheduling import Request, SamplingParams
from pageloom_schedulers.policy import Victim
from pageloom_schedulers.priority import Priority
from simulation import make_request, simulate


def priority(**options):
    return Priority(Priority.Config(**options))


def running(simulation):
    return set(simulation.planner.running)


def test_the_lowest_number_is_admitted_first_and_among_equals_the_earliest():
    simulation = simulate(priority(), max_num_seqs=1)
    for name, level in {"a": 1, "b": 0, "c": -1, "d": 0}.items():
        simulation.add(make_request(name, 4, 2, arrival=ord(name) / 1000, priority=level))
    order = [r.request_id for plan, _ in simulation.drive([]) for r in plan.admitted]
    assert order == ["c", "b", "d", "a"]


def test_a_better_request_takes_the_seat_of_the_worst():
    simulation = simulate(priority(), max_num_seqs=3)
    for name, level in {"a": 0, "b": 2, "c": 1}.items():
        simulation.add(make_request(name, 4, 9, priority=level))
    simulation.step()
    simulation.add(make_request("d", 4, 9, priority=0))
    plan, _ = simulation.step()
    assert [request.request_id for request in plan.preempted] == ["b"]
    assert running(simulation) == {"a", "c", "d"}


def test_a_better_request_takes_blocks():
    simulation = simulate(priority(), num_blocks=6, enable_prefix_caching=False)
    simulation.add(make_request("a", 8, 9, priority=1))
    simulation.add(make_request("b", 8, 9, priority=2))
    simulation.step()
    simulation.add(make_request("c", 12, 9, priority=0))
    plan, _ = simulation.step()
    assert [request.request_id for request in plan.preempted] == ["b"]
    assert running(simulation) == {"a", "c"}


def test_an_equal_request_waits():
    simulation = simulate(priority(), max_num_seqs=1)
    simulation.add(make_request("a", 4, 9, arrival=1.0))
    simulation.step()
    simulation.add(make_request("b", 4, 9, arrival=0.0))  # earlier, but by less than a level
    for _ in range(3):
        plan, _ = simulation.step()
        assert not plan.preempted
    assert running(simulation) == {"a"}


def test_nobody_gives_way_to_a_request_that_could_not_be_seated_anyway():
    simulation = simulate(priority(), max_num_seqs=4)
    simulation.add(make_request("a", 4, 9, priority=0))
    simulation.add(make_request("b", 4, 9, priority=5))
    simulation.step()
    params = SamplingParams(n=4, max_tokens=9)
    simulation.add(Request("wide", [0] * 4, params, arrival_time=0.0, priority=1))
    plan, _ = simulation.step()
    assert not plan.preempted
    assert running(simulation) == {"a", "b"}


@pytest.mark.parametrize(("later", "first"), [(9.0, "urgent"), (11.0, "patient")])
def test_waiting_makes_up_for_priority(later, first):
    """One level for each 5 seconds, so two levels for 10."""
    simulation = simulate(priority(ageing_seconds=5.0), max_num_seqs=1)
    simulation.add(make_request("patient", 4, 9, arrival=0.0, priority=2))
    simulation.add(make_request("urgent", 4, 9, arrival=later, priority=0))
    simulation.step()
    assert running(simulation) == {first}


@pytest.mark.parametrize(
    ("victim", "name"), [(Victim.last_admitted, "c"), (Victim.least_computed, "b")]
)
def test_the_victim_is_of_the_worst_level(victim, name):
    simulation = simulate(
        priority(victim=victim), max_num_seqs=4, num_blocks=30, enable_prefix_caching=False
    )
    for each, level, prompt in [("a", 0, 1), ("b", 3, 4), ("c", 3, 8), ("d", 1, 1)]:
        simulation.add(make_request(each, prompt, 9, priority=level))
    simulation.step()
    simulation.add(make_request("e", 4, 9, priority=-1))
    plan, _ = simulation.step()
    assert [request.request_id for request in plan.preempted] == [name]


@pytest.mark.parametrize("wrong", [0.0, -1.0, math.inf])
def test_ageing_cannot_be_switched_off(wrong):
    with pytest.raises(ConfigError, match="ageing_seconds must be more than 0 and finite"):
        build_options(Priority, {"ageing_seconds": wrong})
