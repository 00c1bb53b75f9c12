"""The options that all policies have: who gives way, and how much prefills get."""

from __future__ import annotations

from random import Random

import pytest

from pageloom.bench.workload import SHAREGPT
from pageloom.config import ConfigError, build_options
from pageloom.scheduling import Request, SamplingParams
from pageloom_schedulers.fair import Fair
from pageloom_schedulers.fcfs import FCFS
from pageloom_schedulers.policy import Victim
from pageloom_schedulers.priority import Priority
from pageloom_schedulers.sjf import SJF
from pageloom_schedulers.tokens import PrefillShare
from simulation import make_request, simulate

POLICIES = [FCFS, Priority, SJF, Fair]


@pytest.mark.parametrize("policy", POLICIES)
def test_options_are_given_by_name(policy):
    config = build_options(policy, {"victim": "least_computed", "prefill_share": "adaptive"})
    assert config.victim is Victim.least_computed
    assert config.prefill_share is PrefillShare.adaptive
    assert build_options(policy, {}).victim is Victim.last_admitted
    assert build_options(policy, {}).prefill_share is PrefillShare.fixed


def test_a_wrong_option_is_answered_with_those_there_are():
    with pytest.raises(ConfigError) as caught:
        build_options(FCFS, {"victim": "oldest", "prefill_shar": "adaptive"})
    text = str(caught.value)
    assert "one of last_admitted, least_computed" in text
    assert "prefill_share" in text


@pytest.mark.parametrize(
    ("victim", "name"), [(Victim.last_admitted, "c"), (Victim.least_computed, "b")]
)
@pytest.mark.parametrize("policy", POLICIES)
def test_who_gives_way(policy, victim, name):
    """For "a", when it lacks a block: who was admitted last, or who loses fewest tokens."""
    simulation = simulate(
        policy(policy.Config(victim=victim)), num_blocks=9, enable_prefix_caching=False
    )
    for number, (each, prompt) in enumerate([("a", 7), ("b", 1), ("c", 11)]):
        simulation.add(make_request(each, prompt, 20, arrival=float(number)))
        simulation.step()
    plan, _ = simulation.step()
    while not plan.preempted:
        plan, _ = simulation.step()
    assert [request.request_id for request in plan.preempted] == [name]
    assert plan.chunks[0].branch.request.request_id == "a"


def recomputed(victim, seed):
    """Tokens computed again when requests as in ShareGPT keep coming and the pool is too small."""
    simulation = simulate(
        FCFS(FCFS.Config(victim=victim)),
        num_blocks=800,
        block_size=16,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        max_model_len=2048,
        enable_prefix_caching=False,
    )
    requests = (
        make_request(number, lengths.prompt_tokens, lengths.output_tokens, arrival=float(number))
        for number, lengths in enumerate(SHAREGPT.lengths(200, Random(seed)))
    )
    plans = [plan for plan, _ in simulation.drive(requests)]
    return sum(chunk.num_recomputed for plan in plans for chunk in plan.chunks)


def test_least_computed_wastes_less_than_last_admitted():
    least, last = (
        sum(recomputed(victim, seed) for seed in range(4))
        for victim in (Victim.least_computed, Victim.last_admitted)
    )
    assert 0 < least < 0.95 * last


def decoding(share, decodes, seats=16, budget=64, **limits):
    """A simulation in which so many requests decode."""
    simulation = simulate(
        FCFS(FCFS.Config(prefill_share=share)),
        num_blocks=400,
        max_num_seqs=seats,
        max_num_batched_tokens=budget,
        **{"max_model_len": 200, "enable_prefix_caching": False} | limits,
    )
    for number in range(decodes):
        simulation.add(make_request(number, 1, 100))
    while any(r.view.is_prefill for r in simulation.planner.running.values()) or (
        simulation.planner.waiting
    ):
        simulation.step()
    return simulation


def tokens(plan):
    return {chunk.branch.request.request_id: chunk.num_tokens for chunk in plan.chunks}


@pytest.mark.parametrize(
    ("share", "decodes", "prefill"),
    [
        (PrefillShare.fixed, 0, 64),
        (PrefillShare.fixed, 4, 60),
        (PrefillShare.fixed, 12, 52),
        (PrefillShare.adaptive, 0, 64),
        (PrefillShare.adaptive, 4, 48),  # 64 * (1 - 4 / 16)
        (PrefillShare.adaptive, 12, 16),  # 64 * (1 - 12 / 16)
        (PrefillShare.adaptive, 15, 8),  # 64 / 8, and not 64 * (1 - 15 / 16)
    ],
)
def test_how_many_tokens_prefills_get(share, decodes, prefill):
    simulation = decoding(share, decodes)
    simulation.add(make_request("long", 150, 4))
    for _ in range(2):
        plan, _ = simulation.step()
        assert tokens(plan) == {**{str(n): 1 for n in range(decodes)}, "long": prefill}


def test_several_prefills_share():
    simulation = decoding(PrefillShare.adaptive, 8)
    for name in ("first", "second"):
        simulation.add(make_request(name, 20, 4))
    plan, _ = simulation.step()
    assert sum(n for name, n in tokens(plan).items() if not name.isdigit()) == 32
    assert tokens(plan)["first"] == 20


def test_a_whole_prompt_may_exceed_the_share_but_not_take_the_decodes_tokens():
    simulation = decoding(
        PrefillShare.adaptive, 12, enable_chunked_prefill=False, max_model_len=60, seats=20
    )
    for name, prompt in [("a", 50), ("b", 12)]:
        simulation.add(make_request(name, prompt, 4))
    plan, _ = simulation.step()
    assert tokens(plan) == {**{str(n): 1 for n in range(12)}, "a": 50}
    plan, _ = simulation.step()
    assert tokens(plan)["b"] == 12
    simulation.add(make_request("c", 51, 4))  # 14 decode
    plan, _ = simulation.step()
    assert set(tokens(plan)) == {*map(str, range(12)), "a", "b"}


@pytest.mark.parametrize("share", PrefillShare)
def test_no_decode_waits_for_a_prefill(share):
    simulation = decoding(share, 8, budget=16)
    for number in range(6):
        simulation.add(make_request(f"long {number}", 90, 2))
    for _ in range(30):
        plan, _ = simulation.step()
        assert {str(n) for n in range(8)} <= set(tokens(plan))


def test_branches_that_decode_count_each():
    simulation = decoding(PrefillShare.adaptive, 0)
    params = SamplingParams(n=8, max_tokens=50)
    simulation.add(Request("wide", [0] * 4, params, arrival_time=0.0))
    simulation.step()
    simulation.add(make_request("long", 150, 4))
    plan, _ = simulation.step()
    assert [c.num_tokens for c in plan.chunks] == [1] * 8 + [32]
