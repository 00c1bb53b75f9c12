"""Plans and the planner under policies of every kind, from chaotic to stuck."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom.contract import Scheduler
from pageloom.scheduling import PolicyError, RequestTooLargeError, SamplingParams
from pageloom.scheduling.request import Status
from simulation import make_request, simulate


class Policy(Scheduler):
    """A policy made of a function."""

    def __init__(self, function):
        super().__init__(self.Config())
        self.schedule = function

    def schedule(self, view, plan): ...


def run_all(view, plan):
    for request in [*view.running, *view.waiting]:
        plan.run(request)


@settings(max_examples=80)
@given(data=st.data())
def test_no_policy_can_exceed_a_limit_or_lose_a_block(data):
    """A policy that runs and preempts at random, while requests arrive and are aborted."""

    def chaos(view, plan):
        requests = [*view.running, *view.waiting]
        for request in data.draw(st.permutations(requests)):
            free, tokens, seats = plan.blocks_free, plan.tokens_left, plan.seats_left
            action = data.draw(st.sampled_from(["run", "run", "some", "preempt", "skip"]))
            if action == "run":
                granted = plan.run(request)
                assert granted <= min(tokens, request.pending_tokens)
                assert (plan.refusal is None) == bool(granted)
                if plan.refusal == "tokens":
                    assert not tokens or not chunked
                if plan.refusal == "seats":
                    assert not seats
            elif action == "some":
                most = data.draw(st.integers(1, 9))
                assert plan.run(request, most) <= most
            elif action == "preempt" and plan.preemptible(request):
                plan.preempt(request)
                assert plan.blocks_free >= free
                assert not plan.preemptible(request)
            assert plan.tokens_left >= 0
            assert plan.seats_left >= 0

    chunked = data.draw(st.booleans())
    sim = simulate(
        Policy(chaos),
        num_blocks=data.draw(st.integers(10, 24)),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_num_batched_tokens=data.draw(st.integers(1, 20)) if chunked else 64,
        max_model_len=40,
        enable_chunked_prefill=chunked,
    )
    sim.planner.MAX_EMPTY_PLANS = sim.planner.MAX_PREEMPTIONS_PER_SEAT = 1 << 30
    requests = []
    for number in range(data.draw(st.integers(5, 25))):
        if data.draw(st.booleans()):
            request = make_request(
                number, data.draw(st.integers(1, 25)), data.draw(st.integers(1, 15)), number
            )
            requests.append(request)
            sim.add(request)
        plan, _ = sim.step()
        assert plan.num_tokens <= sim.planner.limits.max_num_batched_tokens
        assert len(sim.planner.running) <= sim.planner.limits.max_num_seqs
        for request in sim.planner.running.values():
            (branch,) = request.branches
            assert branch.num_computed <= branch.table.capacity
            assert request.status is Status.RUNNING
        for request in sim.planner.waiting.values():
            assert not request.branches[0].table.blocks
            assert request.branches[0].num_computed == 0
        if sim.planner.has_requests and data.draw(st.integers(0, 5)) == 0:
            pick = data.draw(
                st.sampled_from([*sim.planner.running.values(), *sim.planner.waiting.values()])
            )
            sim.planner.finish(pick, "abort")
        sim.planner.check_integrity()
    sim.planner.scheduler = Policy(_patient)
    while sim.planner.has_requests:
        sim.step()
    assert sim.planner.pool.num_used == 0
    assert all(request.status is Status.FINISHED for request in requests)


def _patient(view, plan):
    """Only the oldest running request, or else the first waiting one."""
    for other in view.running[1:]:
        plan.preempt(other)
    for request in view.running[:1] or list(view.waiting)[:1]:
        plan.run(request)


def test_preemption_keeps_tokens_and_counts_what_is_recomputed():
    preempt = False

    def policy(view, plan):
        for request in view.running:
            if preempt:
                plan.preempt(request)
                return
        run_all(view, plan)

    sim = simulate(Policy(policy), enable_prefix_caching=False)
    request = make_request("a", prompt=5, output=9)
    sim.add(request)
    sim.step()
    sim.step()
    assert request.branches[0].output_token_ids == [1, 1]
    preempt = True
    sim.step()
    preempt = False
    assert sim.planner.pool.num_used == 0
    assert request.view.pending_tokens == 7
    assert request.view.preemptions == 1
    plan, _ = sim.step()
    assert [(chunk.num_tokens, chunk.num_recomputed) for chunk in plan.chunks] == [(7, 6)]
    assert request.branches[0].output_token_ids == [1, 1, 1]


def test_preempted_requests_wait_ahead_of_the_queue():
    def policy(view, plan):
        for request in reversed(view.running):
            plan.preempt(request)
        if not view.running:
            run_all(view, plan)

    sim = simulate(Policy(policy), max_num_seqs=2)
    for name in "abc":
        sim.add(make_request(name, 4, 4))
    sim.step()
    sim.step()
    assert list(sim.planner.waiting) == ["a", "b", "c"]


@pytest.mark.parametrize("twice", ["run", "preempt"])
def test_a_request_is_settled_once_in_a_plan(twice):
    def policy(view, plan):
        for request in [*view.running, *view.waiting]:
            plan.run(request)
            getattr(plan, twice)(request)

    sim = simulate(Policy(policy))
    sim.add(make_request("a", 4, 4))
    with pytest.raises(PolicyError, match=r"'Policy' failed: .* already ran or was preempted"):
        sim.step()


def test_a_waiting_request_cannot_be_preempted():
    sim = simulate(Policy(lambda view, plan: plan.preempt(next(iter(view.waiting)))))
    sim.add(make_request("a", 4, 4))
    with pytest.raises(PolicyError, match="a is not running"):
        sim.step()


def test_a_stranger_is_no_request():
    sim = simulate(Policy(lambda view, plan: plan.run("a")))
    sim.add(make_request("a", 4, 4))
    with pytest.raises(PolicyError, match="'a' is not a request of this view"):
        sim.step()


def test_a_policy_that_raises_loses_nothing():
    broken = True

    def policy(view, plan):
        run_all(view, plan)
        if broken:
            raise KeyError("oops")

    sim = simulate(Policy(policy))
    sim.add(make_request("a", 4, 4))
    with pytest.raises(PolicyError, match="scheduling policy 'Policy' failed: KeyError: 'oops'"):
        sim.step()
    sim.planner.check_integrity()
    broken = False
    while sim.planner.has_requests:
        sim.step()
    assert sim.planner.pool.num_used == 0


def test_a_policy_that_does_nothing_is_reported():
    sim = simulate(Policy(lambda view, plan: None))
    sim.add(make_request("a", 4, 4))
    sim.planner.plan()
    with pytest.raises(PolicyError, match=r"'Policy' makes no progress: .* 1 waiting"):
        sim.planner.plan()


def test_a_policy_that_preempts_and_readmits_in_circles_is_reported():
    def policy(view, plan):
        if view.running:
            plan.preempt(view.running[0])
        else:
            plan.run(next(iter(view.waiting)), 2)

    sim = simulate(Policy(policy))
    sim.add(make_request("a", 9, 4))
    for _ in range(65):
        sim.step()
    with pytest.raises(PolicyError, match=r"'Policy' makes no progress: 33 preemptions"):
        sim.step()


def test_a_policy_may_preempt_one_request_a_step():
    def policy(view, plan):
        if len(view.running) > 1:
            plan.preempt(view.running[-1])
        else:
            run_all(view, plan)

    sim = simulate(Policy(policy))
    for name in "abcd":
        sim.add(make_request(name, 4, 6))
    while sim.planner.has_requests:
        sim.step()


def test_a_plan_is_closed_when_the_policy_returns():
    kept = []

    def policy(view, plan):
        kept.append((plan, view))
        run_all(view, plan)

    sim = simulate(Policy(policy))
    request = make_request("a", 4, 4)
    sim.add(request)
    sim.step()
    plan, _ = kept[0]
    for call in (plan.run, plan.preempt, plan.preemptible):
        with pytest.raises(ValueError, match="this plan is closed"):
            call(request.view)
    with pytest.raises(AttributeError):
        plan.tokens_left = 1000


def test_a_request_of_another_engine_is_a_stranger():
    other = simulate(Policy(run_all))
    foreign = make_request("a", 4, 4)
    other.add(foreign)
    sim = simulate(Policy(lambda view, plan: plan.run(foreign.view)))
    sim.add(make_request("a", 4, 4))
    with pytest.raises(PolicyError, match="is not a request of this view"):
        sim.step()
    assert other.planner.pool.num_used == 0


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "2"])
def test_a_limit_on_a_grant_is_a_positive_integer(wrong):
    sim = simulate(Policy(lambda view, plan: plan.run(next(iter(view.waiting)), wrong)))
    sim.add(make_request("a", 4, 4))
    with pytest.raises(PolicyError, match="max_tokens must be an integer of at least 1"):
        sim.step()


def test_without_chunked_prefill_a_prompt_is_granted_whole_or_not_at_all():
    granted = []

    def policy(view, plan):
        request = next(iter(view.waiting))
        granted.append((plan.run(request, 3), plan.refusal))
        granted.append((plan.run(request), plan.refusal))

    sim = simulate(Policy(policy), enable_chunked_prefill=False, max_num_batched_tokens=64)
    sim.add(make_request("a", 8, 1))
    sim.step()
    assert granted == [(0, "tokens"), (8, None)]


def test_an_idle_engine_is_no_stall():
    sim = simulate(Policy(lambda view, plan: None))
    for _ in range(5):
        assert not sim.planner.plan().chunks


def test_views_are_read_only():
    request = make_request("a", 4, 4, metadata={"deadline": 5})
    with pytest.raises(AttributeError):
        request.view.priority = -1
    with pytest.raises(TypeError):
        request.view.metadata["deadline"] = 6


@pytest.mark.parametrize(
    ("prompt", "output", "limits", "message"),
    [
        (0, 4, {}, "empty prompt"),
        (64, 1, {}, "a prompt of 64 tokens, but max_model_len is 64"),
        (
            40,
            20,
            {"num_blocks": 10},
            r"15 KV blocks \(40 prompt \+ 20 output",
        ),
        (42, None, {"num_blocks": 10}, r"11 KV blocks \(42 prompt \+ 1 output"),
        (
            30,
            4,
            {"max_num_batched_tokens": 32, "enable_chunked_prefill": False},
            "33 tokens in one step, but max_num_batched_tokens is 32",
        ),
    ],
)
def test_a_request_that_could_never_run_is_refused_on_arrival(prompt, output, limits, message):
    sim = simulate(Policy(run_all), **limits)
    with pytest.raises(ValueError, match=message):
        sim.add(make_request("a", prompt, output))
    assert not sim.planner.has_requests


def test_the_largest_request_that_fits_runs():
    sim = simulate(Policy(run_all), num_blocks=10, max_model_len=41)
    sim.add(make_request("a", 40, 1))
    sim.step()
    sim.add(make_request("b", 1, 40))
    while sim.planner.has_requests:
        sim.step()
    with pytest.raises(RequestTooLargeError):
        sim.add(make_request("c", 41, 1))


def test_a_request_id_is_used_once_at_a_time():
    sim = simulate(Policy(run_all))
    sim.add(make_request("a", 4, 1))
    with pytest.raises(ValueError, match="request id 'a' is in use"):
        sim.add(make_request("a", 4, 1))
    sim.step()
    sim.add(make_request("a", 4, 1))


@pytest.mark.parametrize(
    ("limits", "total"),
    [
        ({"max_model_len": 30}, 30),
        ({"num_blocks": 5}, 21),
        ({"max_num_batched_tokens": 25, "enable_chunked_prefill": False}, 26),
    ],
)
def test_without_max_tokens_a_request_takes_all_the_room_there_is(limits, total):
    sim = simulate(Policy(run_all), **limits)
    request = make_request("a", 10, None)
    sim.add(request)
    while sim.planner.has_requests:
        sim.step()
    assert 10 + len(request.branches[0].output_token_ids) == total


def test_max_tokens_end_at_max_model_len():
    sim = simulate(Policy(run_all), max_model_len=16)
    request = make_request("a", 10, 100)
    sim.add(request)
    while sim.planner.has_requests:
        sim.step()
    assert len(request.branches[0].output_token_ids) == 6


def test_stop_tokens_wait_for_min_tokens():
    from pageloom.scheduling import Request

    params = SamplingParams(max_tokens=9, min_tokens=3)
    request = Request("a", [0], params, arrival_time=0.0, eos_token_ids=frozenset([1]))
    sim = simulate(Policy(run_all))
    sim.add(request)
    while sim.planner.has_requests:
        sim.step()
    assert len(request.branches[0].output_token_ids) == 3
