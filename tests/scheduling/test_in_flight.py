"""Several plans under way at once, as the stages of a pipeline need."""

from __future__ import annotations

import pytest

from pageloom.contract import Scheduler
from pageloom.scheduling import Planner, PolicyError, StepPlan
from pageloom.testing.scenarios import Arrival, Scenario, play
from simulation import make_request, simulate


class RunAll(Scheduler):
    def schedule(self, view, plan):
        for request in [*view.running, *view.waiting]:
            plan.run(request)


def pipeline(**limits):
    return simulate(RunAll(RunAll.Config()), **limits)


def test_steps_in_flight_share_the_running_requests_evenly():
    sim = pipeline(steps_in_flight=2)
    planner = sim.planner
    for name in range(8):
        planner.add(make_request(name, 2, 9))
    first = planner.plan()
    assert len(first.chunks) == 8  # nobody ran yet, so nothing is to be shared
    assert not planner.plan().chunks  # all are under way
    for chunk in first.chunks:
        planner.advance(chunk, [1])
    planner.complete(first)
    planner.complete(StepPlan(()))
    plans = [planner.plan(), planner.plan()]
    ran = [[chunk.branch.request.request_id for chunk in plan.chunks] for plan in plans]
    assert ran == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    assert not planner.plan().chunks


def test_a_request_may_end_while_its_step_is_in_flight():
    sim = pipeline(steps_in_flight=2, num_blocks=2, max_num_seqs=2)
    planner = sim.planner
    gone, comes = make_request("gone", 6, 2), make_request("comes", 6, 2)
    planner.add(gone)
    plan = planner.plan()
    planner.finish(gone, "abort")
    planner.add(comes)  # needs the blocks of the other
    following = planner.plan()
    assert [chunk.branch.request for chunk in following.chunks] == [comes]
    planner.complete(plan)
    planner.complete(following)
    assert sim.planner.pool.num_used == 2


def test_a_policy_is_not_stuck_while_all_requests_are_in_flight():
    sim = pipeline(steps_in_flight=3)
    sim.add(make_request(0, 2, 30))
    planner = sim.planner
    plan = planner.plan()
    assert not any(planner.plan().chunks for _ in range(2 * planner.MAX_EMPTY_PLANS))
    assert plan.chunks


class GivesWay(Scheduler):
    """First come, first served; the last admitted gives way."""

    def schedule(self, view, plan):
        for request in view.running:
            while plan.preemptible(request) and not plan.run(request) and plan.refusal == "blocks":
                plan.preempt(next(r for r in reversed(view.running) if plan.preemptible(r)))
        for request in view.waiting:
            if not plan.run(request):
                break


CROWDED = {
    "num_blocks": 10,
    "block_size": 1,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 48,
    "max_model_len": 48,
    "enable_chunked_prefill": False,
    "enable_prefix_caching": False,
    "steps_in_flight": 2,
}


def crowd():
    arrivals = (
        Arrival(prompt=1, output=1),
        Arrival(prompt=2, output=4, beam_width=2),
        Arrival(prompt=2, output=4, n=2, step=1),
    )
    return list(play(GivesWay(GivesWay.Config()), Scenario(CROWDED, arrivals)))


def test_requests_of_different_steps_do_not_evict_each_other_for_ever(monkeypatch):
    assert len(crowd()) < 40
    monkeypatch.setattr(Planner, "_growth", lambda self: 0)  # what keeps them from it
    with pytest.raises(PolicyError, match="no progress"):
        crowd()
