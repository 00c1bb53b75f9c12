"""First come, first served."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom_schedulers.fcfs import FCFS
from simulation import drive, make_planner, make_request, step


def fcfs():
    return FCFS(FCFS.Config())


def test_200_000_requests_leave_no_block_in_use():
    draw = random.Random(0)
    planner = make_planner(
        fcfs(),
        num_blocks=60,
        block_size=4,
        max_num_seqs=64,
        max_num_batched_tokens=512,
    )
    requests = (
        make_request(number, draw.randint(1, 24), draw.randint(1, 12), number)
        for number in range(200_000)
    )
    finished = preempted = 0
    for plan, done in drive(planner, requests):
        finished += len(done)
        preempted += len(plan.preempted)
    assert finished == 200_000
    assert preempted > 1_000, "the pool is meant to be too small"
    assert planner.pool.num_used == 0


@settings(max_examples=60)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=20),
    num_blocks=st.integers(13, 40),
    max_num_seqs=st.integers(1, 8),
    budget=st.integers(1, 40),
    chunked=st.booleans(),
)
def test_everybody_is_served_in_order_of_arrival(sizes, num_blocks, max_num_seqs, budget, chunked):
    planner = make_planner(
        fcfs(),
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget if chunked else 64,
        enable_chunked_prefill=chunked,
    )
    requests = [make_request(i, p, o, i) for i, (p, o) in enumerate(sizes)]
    started: list[str] = []
    most_steps = sum(p + o for p, o in sizes) * (1 + len(sizes)) * 4
    for taken, (plan, _) in enumerate(drive(planner, requests)):
        started += [r.request_id for r in plan.admitted if r.request_id not in started]
        assert taken < most_steps
        # A younger request is never preferred when blocks run out.
        if plan.preempted:
            oldest = min(request.arrival_time for request in plan.preempted)
            assert all(chunk.branch.request.arrival_time <= oldest for chunk in plan.chunks)
    assert started == [request.request_id for request in requests]


def test_decodes_run_beside_a_long_prefill():
    planner = make_planner(fcfs(), max_num_batched_tokens=8)
    planner.add(make_request("short", 3, 20))
    step(planner)
    planner.add(make_request("long", 30, 4))
    for _ in range(4):
        plan, _ = step(planner)
        assert [(c.branch.request.request_id, c.num_tokens) for c in plan.chunks] == [
            ("short", 1),
            ("long", 7),
        ]


def test_nobody_is_admitted_in_a_step_that_preempts():
    planner = make_planner(fcfs(), num_blocks=4, max_model_len=17)
    for name in "abc":
        planner.add(make_request(name, 5, 10))
    step(planner)
    assert list(planner.running) == ["a", "b"]
    while True:
        plan, _ = step(planner)
        if plan.preempted:
            break
    assert [request.request_id for request in plan.preempted] == ["b"]
    assert list(planner.running) == ["a"]
    assert list(planner.waiting) == ["b", "c"]
