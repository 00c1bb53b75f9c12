"""The checks find what a broken planner does to the KV cache, and let a sound one pass."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pageloom.memory import IntegrityError
from pageloom.memory.prefix import PrefixIndex
from pageloom.scheduling import Request, SamplingParams
from pageloom.testing import KVInvariants
from pageloom_schedulers.fcfs import FCFS
from pageloom_schedulers.priority import Priority
from simulation import make_request, simulate


def planned(*requests, steps=0, **limits):
    """A simulation with a planned step that is checked by nobody yet, and its plan."""
    simulation = simulate(FCFS(FCFS.Config()), **limits)
    invariants = KVInvariants(simulation.planner)
    plan = simulation.planner.plan
    for request in requests:
        simulation.add(request)
    invariants.watch()
    for _ in range(steps):
        simulation.step()
    return simulation.planner, invariants, plan()


def forked(prompt=6, output=9):
    params = SamplingParams(n=2, max_tokens=output)
    return Request("forked", list(range(prompt)), params, arrival_time=0.0)


def test_a_sound_plan_passes():
    _, invariants, plan = planned(forked(), make_request("a", 9, 5), steps=1)
    assert plan.copies
    invariants.check(plan)


def test_a_forgotten_copy():
    _, invariants, plan = planned(forked(), steps=1)
    with pytest.raises(IntegrityError, match=r"of request forked has 7 .* token 4, .* is nothing"):
        invariants.check(replace(plan, copies=()))


def test_a_copy_of_the_wrong_block():
    _, invariants, plan = planned(forked(9), make_request("a", 9, 5), steps=1)
    ((source, target),) = plan.copies
    wrong = plan.chunks[0].branch.table.blocks[0]
    assert wrong != source
    with pytest.raises(IntegrityError, match="is something else"):
        invariants.check(replace(plan, copies=((wrong, target),)))


def test_copies_that_depend_on_their_order():
    _, invariants, plan = planned(make_request("a", 9, 5))
    with pytest.raises(IntegrityError, match="copied to and from in one step"):
        invariants.check(replace(plan, copies=((0, 1), (1, 2))))
    with pytest.raises(IntegrityError, match="copied to twice in one step"):
        invariants.check(replace(plan, copies=((0, 2), (1, 2))))


def test_a_slot_that_is_written_twice():
    _, invariants, plan = planned(make_request("a", 9, 5))
    with pytest.raises(IntegrityError, match="is written twice in one step"):
        invariants.check(replace(plan, chunks=plan.chunks * 2))


def test_a_prefix_hit_on_other_tokens(monkeypatch):
    monkeypatch.setattr(PrefixIndex, "find", lambda self, key: next(iter(self._key_of), None))
    simulation = simulate(FCFS(FCFS.Config()))
    KVInvariants(simulation.planner).watch()
    simulation.add(Request("a", [1] * 9, SamplingParams(), arrival_time=0.0))
    simulation.step()
    simulation.add(Request("b", [2] * 9, SamplingParams(), arrival_time=0.0))
    with pytest.raises(IntegrityError, match=r"request b has 9 .* token 0, .* is something else"):
        simulation.step()


def test_a_swap_that_mixes_blocks_up():
    simulation = simulate(
        Priority(Priority.Config()), max_num_seqs=1, host_blocks=20, preemption_mode="swap"
    )
    plan, invariants = simulation.planner.plan, KVInvariants(simulation.planner)
    invariants.watch()
    simulation.add(Request("a", list(range(9)), SamplingParams(), arrival_time=0.0, priority=1))
    simulation.step()
    simulation.add(make_request("b", 9, 1))
    assert simulation.step().plan.swapped_out
    back = plan()
    (first, second, *rest) = back.swapped_in
    mixed = ((first[0], second[1]), (second[0], first[1]), *rest)
    with pytest.raises(IntegrityError, match="is something else"):
        invariants.check(replace(back, swapped_in=mixed))


def test_a_leaked_block():
    planner, invariants, plan = planned(make_request("a", 9, 5))
    leaked = planner.pool.allocate(1)
    with pytest.raises(IntegrityError, match="counts 1 references, 0 tables hold it"):
        invariants.check(plan)
    planner.pool.release(leaked)
    invariants.check(plan)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_num_batched_tokens": 8}, "9 tokens are planned, max_num_batched_tokens is 8"),
        ({"max_num_seqs": 0}, "1 seats are taken, max_num_seqs is 0"),
    ],
)
def test_an_exceeded_limit(limit, message):
    planner, invariants, plan = planned(make_request("a", 9, 5))
    planner.limits = replace(planner.limits, **limit)
    with pytest.raises(AssertionError, match=message):
        invariants.check(plan)


def test_a_prompt_that_is_cut_though_it_may_not_be():
    planner, invariants, plan = planned(make_request("a", 9, 5), max_num_batched_tokens=4)
    planner.limits = replace(planner.limits, enable_chunked_prefill=False)
    with pytest.raises(AssertionError, match="in chunks, but enable_chunked_prefill is off"):
        invariants.check(plan)


def test_a_chunk_out_of_turn():
    _, invariants, plan = planned(make_request("a", 9, 5))
    (chunk,) = plan.chunks
    with pytest.raises(AssertionError, match="run tokens 1 to 8, but 0 are computed"):
        invariants.check(replace(plan, chunks=(replace(chunk, start=1, num_tokens=8),)))
    with pytest.raises(AssertionError, match="has 9 tokens, and is to draw 1 after 5"):
        invariants.check(replace(plan, chunks=(replace(chunk, num_tokens=5),)))


def test_a_preempted_request_that_runs():
    planner, invariants, plan = planned(make_request("a", 9, 5))
    with pytest.raises(AssertionError, match="request a was preempted and is running"):
        invariants.check(replace(plan, preempted=tuple(planner.running.values())))


def test_blocks_of_one_who_waits():
    planner, invariants, plan = planned(make_request("a", 9, 5), make_request("b", 5, 5))
    planner.finish(planner.running["a"], "abort")
    planner.add(make_request("c", 5, 5))
    planner.waiting["c"].branches[0].table.grow(4)
    with pytest.raises(IntegrityError, match="branch 0 of request c is waiting and holds blocks"):
        invariants.check(replace(plan, chunks=plan.chunks[1:]))
    planner.finish(planner.waiting["c"], "abort")


class Serving(RuleBasedStateMachine):
    """A sound planner passes, whatever is asked of it."""

    def __init__(self):
        super().__init__()
        self.simulation = simulate(
            Priority(Priority.Config(ageing_seconds=2.0)), num_blocks=24, host_blocks=12
        )
        self.planner = self.simulation.planner
        KVInvariants(self.planner).watch()
        self.names = iter(range(1000))

    @rule(
        prompt=st.integers(1, 20),
        output=st.integers(1, 12),
        kind=st.sampled_from([{}, {"n": 2}, {"n": 3}, {"beam_width": 2}]),
        priority=st.integers(0, 2),
    )
    def add(self, prompt, output, kind, priority):
        name = next(self.names)
        params = SamplingParams(max_tokens=output, **kind)
        self.simulation.add(
            Request(str(name), [7] * prompt, params, arrival_time=float(name), priority=priority)
        )

    @precondition(lambda self: self.planner.has_requests)
    @rule()
    def step(self):
        self.simulation.step()

    @precondition(lambda self: self.planner.has_requests)
    @rule(pick=st.integers(0, 100))
    def abort(self, pick):
        requests = [*self.planner.running.values(), *self.planner.waiting.values()]
        self.planner.finish(requests[pick % len(requests)], "abort")

    @invariant()
    def blocks_are_accounted_for(self):
        self.planner.check_integrity()
        if not self.planner.has_requests:
            assert self.planner.pool.num_used == self.planner.host.num_used == 0


TestServing = Serving.TestCase
TestServing.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
