"""Fair shares: what tenants are charged, and how far their shares may differ."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom.config import ConfigError, build_options
from pageloom_schedulers import tenants
from pageloom_schedulers.fair import Fair
from pageloom_schedulers.fcfs import FCFS
from pageloom_schedulers.tenants import TenantQueue
from simulation import make_request, simulate

NO_AGEING = 1e-9


def fair(**options):
    return Fair(Fair.Config(**options))


def service(plan):
    """Tokens served to each tenant: one for each of the prompt, two for each drawn."""
    served = {}
    for chunk in plan.chunks:
        request = chunk.branch.request
        prompt = max(0, min(chunk.stop, len(request.prompt_token_ids)) - chunk.start)
        new = prompt if not request.num_preemptions else 0
        served[request.user] = served.get(request.user, 0) + new + 2 * chunk.draws
    return served


SIZES = st.tuples(st.integers(1, 30), st.integers(1, 30))  # prompt and output tokens


@settings(max_examples=30, deadline=None)
@given(heavy=SIZES, light=SIZES)
def test_tenants_who_always_wait_are_served_alike(heavy, light):
    """Within the bound of the paper, at each moment, whatever their requests are like."""
    seats = 4
    simulation = simulate(
        fair(ageing_tokens_per_second=NO_AGEING), max_num_seqs=seats, enable_prefix_caching=False
    )
    for number in range(60):  # the heavy one sends all it has before the light one's first
        simulation.add(make_request(f"heavy {number}", *heavy, user="heavy"))
    for number in range(60):
        simulation.add(make_request(f"light {number}", *light, user="light"))
    bound = max(1 * 30, 2 * seats * 60)
    total = {"heavy": 0, "light": 0}
    while {r.user for r in simulation.planner.waiting.values()} == {"heavy", "light"}:
        plan, _ = simulation.step()
        for tenant, tokens in service(plan).items():
            total[tenant] += tokens
        assert abs(total["heavy"] - total["light"]) <= bound
    assert min(total.values()) > 0


def test_tenants_are_served_alike_when_blocks_run_out():
    simulation = simulate(fair(), num_blocks=20, max_num_seqs=16, enable_prefix_caching=False)
    for number in range(100):
        simulation.add(make_request(f"heavy {number}", 4, 30, user="heavy"))
    for number in range(100):
        simulation.add(make_request(f"light {number}", 16, 12, arrival=1.0, user="light"))
    total, preempted = {"heavy": 0, "light": 0}, 0
    while {r.user for r in simulation.planner.waiting.values()} == {"heavy", "light"}:
        plan, _ = simulation.step()
        preempted += len(plan.preempted)
        for tenant, tokens in service(plan).items():
            total[tenant] += tokens
    assert preempted > 50
    assert 0.9 < total["heavy"] / total["light"] < 1.1


def test_first_come_first_served_is_not_fair():
    """What it is good for: the light tenant comes last."""
    shares = {}
    for policy in (FCFS(FCFS.Config()), fair()):
        simulation = simulate(policy, max_num_seqs=4)
        for number in range(40):
            simulation.add(make_request(f"heavy {number}", 20, 10, user="heavy"))
        for number in range(5):
            simulation.add(make_request(f"light {number}", 20, 10, user="light"))
        ends = [r.user for _, finished in simulation.drive([]) for r in finished]
        shares[type(policy)] = ends[:10].count("light")
    assert shares == {FCFS: 0, Fair: 5}


def test_a_tenant_is_charged_what_it_was_served():
    policy = fair(input_weight=1.0, output_weight=3.0)
    simulation = simulate(policy, max_num_batched_tokens=8)
    simulation.add(make_request("a", 12, 5, user="a"))
    counters = []
    while simulation.planner.has_requests:
        simulation.step()
        counters.append(policy.queue.counter("a"))
    # The prompt at once, and each output token as it is drawn.
    assert counters == [12, 15, 18, 21, 24, 27]


def test_cached_prompt_tokens_are_free():
    policy = fair()
    simulation = simulate(policy)
    for user in ("a", "b"):
        simulation.add(make_request(f"of {user}", 16, 1, user=user))
        simulation.step()
    assert policy.queue.counter("a") == 16 + 2
    assert policy.queue.counter("b") == 18 + 4 + 2  # lifted to the last one's; 12 of 16 cached


def test_what_is_computed_again_is_free():
    policy = fair()
    simulation = simulate(policy, num_blocks=8, enable_prefix_caching=False)
    simulation.add(make_request("a", 12, 20, arrival=0.0, user="a"))
    simulation.add(make_request("b", 12, 12, arrival=1.0, user="b"))
    preempted = [r for plan, _ in simulation.drive([]) for r in plan.preempted]
    assert [request.request_id for request in preempted] == ["b"]
    assert policy.queue.counter("b") == 12 + 2 * 12


def test_who_comes_back_from_idling_is_lifted_to_the_lowest_of_those_who_wait():
    policy = fair(ageing_tokens_per_second=NO_AGEING)
    simulation = simulate(policy, max_num_seqs=1)
    for number in range(10):
        simulation.add(make_request(f"a {number}", 10, 10, user="a"))
    for _ in range(35):
        simulation.step()
    low = policy.queue.counter("a")
    assert low > 80
    for number in range(10):
        simulation.add(make_request(f"b {number}", 10, 10, user="b"))
    ends = [r.user for _, finished in simulation.drive([]) for r in finished]
    # It does not get all it did not ask for before, but its share from now on.
    assert ends[1:9].count("b") == 4


@pytest.mark.parametrize(("ageing", "served"), [(NO_AGEING, False), (5.0, True)])
def test_ageing_lets_nobody_starve_behind_ever_new_tenants(ageing, served):
    simulation = simulate(fair(ageing_tokens_per_second=ageing), max_num_seqs=1)
    simulation.add(make_request("a 0", 30, 30, user="a"))
    simulation.step()
    ended = set()
    for second in range(200):
        # Two seconds of work each, for tenants who start as low as the first of them did.
        simulation.add(make_request(second, 4, 2, arrival=second, user=f"tenant {second}"))
        if second == 50:
            simulation.add(make_request("a 1", 4, 2, arrival=second, user="a"))
        ended |= {request.request_id for request in simulation.step().finished}
    assert "a 0" in ended
    assert ("a 1" in ended) is served


class Stub:
    """A request as far as a queue looks at it."""

    preemptions = 0

    def __init__(self, user, arrival_time):
        self.user = user
        self.arrival_time = arrival_time


def test_a_queue_gives_each_tenants_requests_in_order_of_arrival():
    queue = TenantQueue(ageing=0.0)
    requests = [Stub(user, time) for time in range(3) for user in "ab"]
    for request in reversed(requests):
        queue.push(request)
    taken = []
    while queue.first() is not None:
        request = queue.pop()
        queue.charge(request.user, 10.0)
        taken.append(request)
    assert [request.arrival_time for request in taken] == [0, 0, 1, 1, 2, 2]
    with pytest.raises(IndexError):
        queue.pop()


@given(
    st.lists(
        st.tuples(st.sampled_from(["push", "pop", "end", "charge", "back"]), st.integers(0, 5))
    )
)
def test_a_queue_gives_the_tenant_that_ranks_lowest(calls):
    """Against a plain search, over any history."""
    queue = TenantQueue(ageing=1.0)
    waiting, running, clock = [], [], 0.0
    for call, pick in calls:
        clock += 1.0
        if call == "push":
            waiting.append(Stub("abcdef"[pick], clock))
            queue.push(waiting[-1])
        elif call == "pop" and waiting:
            request = queue.pop()
            ranks = {
                user: queue.counter(user) + min(r.arrival_time for r in waiting if r.user == user)
                for user in {r.user for r in waiting}
            }
            assert ranks[request.user] == min(ranks.values())
            same = [r.arrival_time for r in waiting if r.user == request.user]
            assert request.arrival_time == min(same)
            waiting.remove(request)
            running.append(request)
        elif call == "back" and running:
            request = running.pop(pick % len(running))
            waiting.append(request)
            queue.push_back(request)
        elif call == "charge" and running:
            queue.charge(running[pick % len(running)].user, 7.0 * pick)
        elif call == "end" and (waiting or running):
            everyone = waiting + running
            request = everyone[pick % len(everyone)]
            (waiting if request in waiting else running).remove(request)
            queue.end(request)
    assert (queue.first() is None) == (not waiting)


def test_counters_of_idle_tenants_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(tenants, "MAX_IDLE_TENANTS", 10)
    queue = TenantQueue(ageing=0.0)
    for number in range(100):
        request = Stub(f"tenant {number}", number)
        queue.push(request)
        queue.pop()
        queue.charge(request.user, 1000.0 + number)
        queue.end(request)
    assert queue.counter("tenant 99") > 0
    assert queue.counter("tenant 90") > 0
    assert queue.counter("tenant 89") == 0


@pytest.mark.parametrize("name", ["input_weight", "output_weight", "ageing_tokens_per_second"])
def test_weights_are_above_0(name):
    with pytest.raises(ConfigError, match=f"{name} must be more than 0 and finite, not 0"):
        build_options(Fair, {name: 0})
