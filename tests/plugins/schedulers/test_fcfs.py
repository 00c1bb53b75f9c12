"""First come, first served."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom_schedulers.fcfs import FCFS
from simulation import make_request, simulate


def fcfs():
    return FCFS(FCFS.Config())


def test_20_000_requests_leave_no_block_in_use():
    draw = random.Random(0)
    simulation = simulate(fcfs(), num_blocks=60, max_num_seqs=64, max_num_batched_tokens=512)
    requests = (
        make_request(number, draw.randint(1, 24), draw.randint(1, 24), number)
        for number in range(20_000)
    )
    finished = preempted = 0
    for plan, done in simulation.drive(requests):
        finished += len(done)
        preempted += len(plan.preempted)
    assert finished == 20_000
    assert preempted > 100, "the pool is meant to be too small"
    assert simulation.planner.pool.num_used == 0


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=20),
    num_blocks=st.integers(13, 40),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 40),
    chunked=st.booleans(),
)
def test_everybody_is_served_in_order_of_arrival(sizes, num_blocks, max_num_seqs, budget, chunked):
    simulation = simulate(
        fcfs(),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else 64,
        enable_chunked_prefill=chunked,
    )
    requests = [make_request(i, p, o, i) for i, (p, o) in enumerate(sizes)]
    started: list[str] = []
    for plan, _ in simulation.drive(requests):
        started += [r.request_id for r in plan.admitted if r.request_id not in started]
        # A younger request is never preferred when blocks run out.
        if plan.preempted:
            oldest = min(request.arrival_time for request in plan.preempted)
            assert all(chunk.branch.request.arrival_time < oldest for chunk in plan.chunks)
    assert started == [request.request_id for request in requests]


def test_decodes_run_beside_a_long_prefill():
    simulation = simulate(fcfs(), max_num_batched_tokens=8)
    simulation.add(make_request("short", 3, 20))
    simulation.step()
    simulation.add(make_request("long", 30, 4))
    for _ in range(4):
        plan, _ = simulation.step()
        assert [(c.branch.request.request_id, c.num_tokens) for c in plan.chunks] == [
            ("short", 1),
            ("long", 7),
        ]


def test_an_older_prefill_leaves_younger_decodes_their_tokens():
    simulation = simulate(fcfs(), max_num_batched_tokens=8, enable_prefix_caching=False)
    simulation.add(make_request("short", 3, 20, 2))
    simulation.step()
    simulation.add(make_request("older", 30, 4, 1))
    for _ in range(4):
        plan, _ = simulation.step()
        tokens = {chunk.branch.request.request_id: chunk.num_tokens for chunk in plan.chunks}
        assert tokens == {"short": 1, "older": 7}


def test_nobody_is_admitted_in_a_step_that_preempts():
    simulation = simulate(fcfs(), num_blocks=6, max_model_len=17, enable_prefix_caching=False)
    for name in "abc":
        simulation.add(make_request(name, 5, 10))
    planner = simulation.planner
    simulation.step()
    assert list(planner.running) == ["a", "b"]
    plan, _ = simulation.step()
    while not plan.preempted:
        plan, _ = simulation.step()
    assert [request.request_id for request in plan.preempted] == ["b"]
    assert list(planner.running) == ["a"]
    assert list(planner.waiting) == ["b", "c"]


def test_who_lacks_blocks_and_is_last_keeps_what_it_has():
    simulation = simulate(fcfs(), num_blocks=4, enable_prefix_caching=False)
    simulation.add(make_request("a", 8, 4))
    simulation.add(make_request("b", 3, 6))
    ran = []
    for _ in range(6):
        plan, _ = simulation.step()
        assert not plan.preempted
        ran.append("".join(chunk.branch.request.request_id for chunk in plan.chunks))
    assert ran == ["ab", "ab", "a", "a", "b", "b"]


def test_nobody_is_admitted_into_the_room_that_others_will_grow_into():
    simulation = simulate(fcfs(), num_blocks=5, enable_prefix_caching=False)
    simulation.add(make_request("grows", 6, 4))
    simulation.add(make_request("waits", 9, 2))
    plan, _ = simulation.step()
    assert [request.request_id for request in plan.admitted] == ["grows"]
    # As long as it may want one more block, which it does for its ninth token.
    while list(simulation.planner.waiting) == ["waits"]:
        plan, done = simulation.step()
        assert not plan.preempted
    assert not done


def test_who_will_not_grow_keeps_no_room():
    simulation = simulate(fcfs(), num_blocks=4, enable_prefix_caching=False)
    for name in "ab":
        simulation.add(make_request(name, 6, 2))
    plan, _ = simulation.step()
    assert [request.request_id for request in plan.admitted] == ["a", "b"]
