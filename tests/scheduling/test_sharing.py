"""Branches that share blocks, prefixes that are found again, and requests that are swapped out."""

from __future__ import annotations

import pytest

from pageloom.contract import Scheduler
from pageloom.memory import blocks_for_branches
from pageloom.scheduling import Request, RequestTooLargeError, SamplingParams
from pageloom.scheduling.simulation import Simulation
from pageloom.testing import KVInvariants


class RunAll(Scheduler):
    """Runs what fits; in the steps after `preempt` was set, that request gives way."""

    preempt: str | None = None

    def schedule(self, view, plan):
        for request in view.running:
            if request.request_id == self.preempt:
                plan.preempt(request)
            else:
                plan.run(request)
        for request in view.waiting:
            if request.request_id != self.preempt:
                plan.run(request)


def simulate(**limits):
    return Simulation(RunAll(RunAll.Config()), **limits)


def make_request(name, prompt, output, **params):
    salt = params.pop("salt", "")
    sampling = SamplingParams(max_tokens=output, **params)
    return Request(name, prompt, sampling, arrival_time=0.0, cache_salt=salt)


def tables(request):
    return [list(branch.table.blocks) for branch in request.branches]


def test_branches_share_the_prompt_and_copy_the_block_they_write():
    sim = simulate()
    request = make_request("a", list(range(10)), 9, n=3)
    sim.add(request)
    plan, _ = sim.step()
    assert [(chunk.num_tokens, chunk.draws) for chunk in plan.chunks] == [(10, 3)]
    first, second, third = tables(request)
    assert first == second == third
    assert sim.planner.pool.num_used == 3
    plan, _ = sim.step()
    assert plan.num_tokens == 3
    assert [source for source, _ in plan.copies] == [first[2]] * 2
    assert sorted(t[2] for t in tables(request)) == sorted(
        [first[2], *(target for _, target in plan.copies)]
    )
    assert [t[:2] for t in tables(request)] == [first[:2]] * 3
    assert sim.planner.pool.num_used == 5


def test_a_full_last_block_is_not_copied():
    sim = simulate()
    request = make_request("a", list(range(8)), 9, n=3)
    sim.add(request)
    sim.step()
    plan, _ = sim.step()
    assert not plan.copies
    assert sim.planner.pool.num_used == 2 + 3


def test_branches_end_on_their_own_and_give_their_seats_back():
    class Uneven(Simulation):
        """Branch 1 ends with its third token, branch 2 with its fourth."""

        def draw(self, branch, count):
            ends = branch.index and len(branch.output_token_ids) > branch.index
            return [50 if ends else 1] * count

    sim = Uneven(RunAll(RunAll.Config()), max_num_seqs=4)
    request = make_request("a", [1] * 6, 8, n=3, stop_token_ids=[50])
    sim.add(request)
    seats = []
    while sim.planner.has_requests:
        sim.step()
        seats.append(request.seats)
    assert seats == [3, 3, 2, 1, 1, 1, 1, 1]
    assert request.output_tokens == 8 + 3 + 4
    assert sim.planner.pool.num_used == 0


def test_a_prefix_is_found_by_a_later_request_and_in_the_same_step():
    sim = simulate()
    prompt = list(range(10))
    one, two = make_request("a", prompt, 1), make_request("b", [*prompt[:8], 77, 78], 1)
    sim.add(one)
    sim.add(two)
    plan, _ = sim.step()
    assert [chunk.num_tokens for chunk in plan.chunks] == [10, 2]
    assert (one.cached_tokens, two.cached_tokens) == (0, 8)
    later = make_request("c", prompt, 1)
    sim.add(later)
    plan, _ = sim.step()
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(8, 2)]
    assert later.cached_tokens == 8


def test_one_token_at_least_is_computed():
    sim = simulate()
    for name in "ab":
        sim.add(make_request(name, list(range(8)), 1))
        sim.step()
    last = make_request("c", list(range(8)), 1)
    sim.add(last)
    plan, _ = sim.step()
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(4, 4)]


def test_what_was_generated_is_found_by_the_next_turn():
    sim = simulate()
    first = make_request("a", list(range(6)), 7)
    sim.add(first)
    while sim.planner.has_requests:
        branch = first.branches[0]
        sim.step()
    turn = make_request("b", [*range(6), *branch.output_token_ids, 3, 3], 1)
    sim.add(turn)
    sim.step()
    assert turn.cached_tokens == 12  # the last token drawn was never computed


@pytest.mark.parametrize(
    ("limits", "request_of"),
    [
        ({"enable_prefix_caching": False}, {}),
        ({}, {"salt": "mine"}),
        ({}, {"prompt_logprobs": 0}),
    ],
)
def test_a_prefix_is_not_taken_from_the_cache(limits, request_of):
    sim = simulate(**limits)
    sim.add(make_request("a", list(range(10)), 1))
    sim.step()
    second = make_request("b", list(range(10)), 1, **request_of)
    sim.add(second)
    plan, _ = sim.step()
    assert plan.num_tokens == 10
    assert second.cached_tokens == 0


def test_a_failed_request_leaves_nothing_in_the_cache():
    sim = simulate()
    request = make_request("a", list(range(10)), 5)
    sim.add(request)
    sim.step()
    sim.planner.finish(request, "error")
    again = make_request("b", list(range(10)), 5)
    sim.add(again)
    sim.step()
    assert again.cached_tokens == 0


def test_a_plan_that_was_never_run_leaves_nothing_in_the_cache():
    sim = simulate()
    request = make_request("a", list(range(10)), 5)
    sim.add(request)
    sim.planner.plan()
    sim.planner.finish(request, "abort")
    again = make_request("b", list(range(10)), 5)
    sim.add(again)
    sim.step()
    assert again.cached_tokens == 0


def test_swapping_brings_back_all_branches_as_they_were():
    sim = simulate(host_blocks=16)
    request = make_request("a", list(range(10)), 9, n=3)
    sim.add(request)
    sim.step()
    sim.step()
    before = sim.planner.pool.num_used
    sim.planner.scheduler.preempt = "a"
    plan, _ = sim.step()
    assert len(plan.swapped_out) == before == sim.planner.host.num_used
    assert sim.planner.pool.num_used == 0
    assert request.view.computed_tokens == 0
    sim.planner.scheduler.preempt = None
    plan, _ = sim.step()
    assert len(plan.swapped_in) == before
    assert [chunk.num_recomputed for chunk in plan.chunks] == [0, 0, 0]
    assert sim.planner.host.num_used == 0
    first, second, third = tables(request)
    assert first[:2] == second[:2] == third[:2]
    assert len({first[2], second[2], third[2]}) == 3


@pytest.mark.parametrize("caching", [False, True])
def test_without_room_on_the_host_every_branch_is_computed_again_from_one_prompt(caching):
    sim = simulate(host_blocks=2, enable_prefix_caching=caching, max_num_batched_tokens=7)
    request = make_request("a", list(range(10)), 9, n=3)
    sim.add(request)
    for _ in range(4):
        sim.step()
    drawn = [branch.output_token_ids[:] for branch in request.branches]
    sim.planner.scheduler.preempt = "a"
    plan, _ = sim.step()
    assert not plan.swapped_out
    assert sim.planner.host.num_used == sim.planner.pool.num_used == 0
    sim.planner.pool.forget_all()
    sim.planner.scheduler.preempt = None
    computed = 0
    while [branch.output_token_ids for branch in request.branches] == drawn:
        plan, _ = sim.step()
        computed += plan.num_tokens
        lengths = {len(branch.output_token_ids) for branch in request.branches}
        assert len(lengths) == 1, "branches draw together"
    outputs = len(drawn[0])
    assert computed == 8 + 3 * (2 + outputs)  # the two full blocks of the prompt once
    assert [branch.output_token_ids[:outputs] for branch in request.branches] == drawn


def test_beams_are_reordered_by_block_table():
    class Scripted(Simulation):
        script = iter([[[1, 2]], [[3, 4], [5, 6]], [[7, 8], [9, 10]]])

        def candidates(self, branch, count):
            rows = next(self.script) if not branch.index else self.rows
            self.rows = rows[1:]
            return [(token, -float(branch.index)) for token in rows[0]]

    sim = Scripted(RunAll(RunAll.Config()))
    request = make_request("a", list(range(6)), 9, beam_width=2)
    sim.add(request)
    sim.step()
    assert [branch.output_token_ids for branch in request.branches] == [[1], [2]]
    plan, _ = sim.step()
    assert len(plan.copies) == 1
    # Both beams go on from the first: the second's block is given back.
    assert [branch.output_token_ids for branch in request.branches] == [[1, 3], [1, 4]]
    assert tables(request)[0] == tables(request)[1]
    assert sim.planner.pool.num_used == 2


def test_used_slots_count_once_however_many_share_them():
    sim = simulate(num_blocks=64)
    prompt = list(range(10))
    for name, params in (("a", {"n": 3}), ("b", {}), ("c", {"n": 2})):
        sim.add(make_request(name, prompt, 20, **params))
    plan, _ = sim.step()
    # Two full blocks that all share, and a block with two tokens each.
    assert sim.planner.kv_tokens(plan) == 8 + 3 * 2
    plan, _ = sim.step()
    assert sim.planner.kv_tokens(plan) == 8 + 6 * 3
    assert sim.planner.pool.num_used == 2 + 6


@pytest.mark.parametrize(
    ("params", "limits", "message", "field"),
    [
        ({"n": 5}, {"max_num_seqs": 4}, "5 branches, .* max_num_seqs is 4; lower n", "n"),
        ({"beam_width": 5}, {"max_num_batched_tokens": 4}, "max_num_batched_tokens is 4", "n"),
        ({"n": 4}, {"num_blocks": 17}, "18 KV blocks .* 4 branches", None),
    ],
)
def test_branches_that_could_never_run_are_refused_on_arrival(params, limits, message, field):
    sim = simulate(**limits)
    with pytest.raises(RequestTooLargeError, match=message) as caught:
        sim.add(make_request("a", list(range(10)), 15, **params))
    assert caught.value.field == field


def test_branches_that_just_fit_run():
    sim = simulate(num_blocks=18)
    sim.add(make_request("a", list(range(10)), 15, n=4))
    while sim.planner.has_requests:
        sim.step()
        sim.planner.check_integrity()


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize("prompt", [7, 8, 9])
@pytest.mark.parametrize("params", [{"n": 3}, {"beam_width": 3}])
def test_branches_that_just_fit_finish_whenever_they_give_way(mode, caching, prompt, params):
    """Also while they are computed again after they gave way before."""
    output = 7
    blocks = blocks_for_branches(3, prompt, prompt + output - 1, 4)
    for first in range(1, 9):
        for second in (0, *range(first + 2, first + 9)):
            sim = simulate(
                num_blocks=blocks,
                host_blocks=blocks,
                max_num_batched_tokens=5,
                enable_prefix_caching=caching,
                preemption_mode=mode,
            )
            KVInvariants(sim.planner).watch()
            request = make_request("a", list(range(prompt)), output, **params)
            sim.add(request)
            for number in range(100):
                gives_way = number in (first, second) and "a" in sim.planner.running
                sim.planner.scheduler.preempt = "a" if gives_way else None
                if number == first:  # not to the host, so that it has to be computed again
                    host, sim.planner.host = sim.planner.host, None
                sim.step()
                if number == first:
                    sim.planner.host = host
                if not sim.planner.has_requests:
                    break
            assert not sim.planner.has_requests


def test_who_comes_back_does_not_find_what_the_other_left_behind():
    """One request is swapped in and another out in the same step, into the same host blocks."""

    class Alternate(Scheduler):
        def schedule(self, view, plan):
            for request in view.waiting:
                plan.run(request)
            for request in view.running:
                plan.preempt(request)

    sim = Simulation(Alternate(Alternate.Config()), host_blocks=8, preemption_mode="swap")
    KVInvariants(sim.planner).watch()
    sim.add(make_request("a", list(range(10)), 9))
    sim.step()
    sim.add(make_request("b", list(range(20, 30)), 9))
    overlapped = 0
    for _ in range(8):
        plan, _ = sim.step()
        hosts = {source for source, _ in plan.swapped_in}
        overlapped += bool(hosts & {target for _, target in plan.swapped_out})
    assert overlapped > 3


def test_a_request_that_was_swapped_is_found_again():
    sim = simulate(host_blocks=16, preemption_mode="swap")
    request = make_request("a", list(range(10)), 20)
    sim.add(request)
    sim.step()
    sim.planner.scheduler.preempt = "a"
    sim.step()
    sim.planner.pool.forget_all()
    sim.planner.scheduler.preempt = None
    sim.step()
    again = make_request("b", list(range(10)), 1)
    sim.add(again)
    sim.step()
    assert again.cached_tokens == 8


def test_after_a_reset_nothing_is_found_that_was_computed_before():
    sim = simulate()
    running = make_request("a", list(range(10)), 20)
    sim.add(running)
    sim.step()
    sim.planner.reset_prefix_cache()
    fresh = make_request("b", list(range(10)), 1)
    sim.add(fresh)
    sim.step()
    assert fresh.cached_tokens == 0
    for _ in range(6):
        sim.step()
    turn = make_request("c", [*range(10), *running.branches[0].output_token_ids, 1], 1)
    sim.add(turn)
    sim.step()
    assert turn.cached_tokens == 8  # of "b"; what "a" went on with is its own


def test_a_policy_is_not_told_of_who_came_and_went_unseen():
    sim = simulate()
    for number in range(3):
        request = make_request(str(number), [1], 1)
        sim.add(request)
        sim.planner.finish(request, "abort")
    assert not sim.planner._arrived
    assert not sim.planner._finished


def test_an_unfinished_beam_search_has_returned_nothing():
    sim = simulate()
    request = make_request("a", list(range(6)), 9, beam_width=2, n=2)
    sim.add(request)
    sim.step()
    assert sim.planner.finish(request, "abort").output_tokens == 0
