"""Requests are served in virtual time, as the engine would have served them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pageloom.bench.serving.trace import RandomPrompt, TraceRequest
from pageloom.bench.simulate.cluster import simulate
from pageloom.bench.simulate.load import (
    Asked,
    Mix,
    UniformLengths,
    random_load,
    trace_load,
    with_arrivals,
)
from pageloom.bench.simulate.meter import Measured
from pageloom.bench.simulate.report import service_gap
from pageloom.bench.simulate.run import Cluster, Outcome, run_all, sustained_rate
from pageloom.bench.simulate.settings import Settings, profile_of, settings_from
from pageloom.config import load_config
from pageloom.contract import RequestRecord, hookimpl
from pageloom.contract.costs import StepCosts
from pageloom.engine.engine import Engine
from pageloom.engine.policy import Policy
from pageloom.errors import PageloomError
from pageloom.scheduling import Limits, SamplingParams
from pageloom.serve.replicas_routing import MARGIN
from pageloom_schedulers.fair import Fair
from pageloom_schedulers.fcfs import FCFS

LENGTHS = UniformLengths((1, 24), (1, 30))
COSTS = StepCosts(constant=1.0)
LIMITS = Limits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, block_size=4)


def settings(scheduler=FCFS, costs=COSTS, max_waiting=None, **limits):
    num_blocks = limits.pop("num_blocks", 64)
    policy = Policy(scheduler.__name__, scheduler, scheduler.Config())
    limits = replace(LIMITS, **limits)
    return Settings("tried", policy, limits, num_blocks, 0, max_waiting, costs)


def trace(*requests):
    """Of (arrival, prompt tokens, output tokens)."""
    return trace_load(
        [
            TraceRequest((), output, arrival, random_prompt=RandomPrompt(prompt))
            for arrival, prompt, output in requests
        ],
        Path("trace"),
    )


def tenants_load(requests, tenants, rate, seed=0):
    return with_arrivals(random_load(Mix(LENGTHS, tenants=tenants), requests, seed), rate, 1, seed)


def test_times_are_those_of_the_steps():
    measured = simulate(settings(), trace((2.0, 20, 5)))
    assert measured.ttft.tolist() == [2.0]  # a prompt of 20 takes two steps of at most 16
    assert measured.tpot.tolist() == [1.0]
    assert measured.e2e.tolist() == [6.0]
    assert measured.queued.tolist() == [0.0]
    assert (measured.busy, measured.ended) == (6.0, 8.0)


def test_who_comes_while_a_step_is_under_way_waits_for_the_next():
    measured = simulate(settings(), trace((0.0, 4, 3), (0.25, 4, 1)))
    assert sorted(measured.ttft.tolist()) == [1.0, 1.75]
    assert sorted(measured.queued.tolist()) == [0.0, 0.75]
    assert measured.counts["steps"] == 3


def test_nothing_is_done_while_nobody_is_there():
    measured = simulate(settings(), trace((0.0, 4, 1), (100.0, 4, 1)))
    assert (measured.busy, measured.ended) == (2.0, 101.0)


class Records:
    def __init__(self):
        self.found = []

    @hookimpl
    def request_finished(self, record: RequestRecord):
        self.found.append(record)


def test_the_engine_on_the_simulated_executor_takes_the_same_time(config):
    loaded = load_config(config)
    load = random_load(Mix(LENGTHS), 40, seed=3)
    simulated = simulate(settings_from(loaded, profile_of(loaded, None), "same"), load)
    records = Records()
    with Engine.from_config(config) as engine:
        engine.plugins.register_observer(records)
        for number, asked in enumerate(load):
            engine.add_request(
                [number] * asked.own_tokens,
                SamplingParams(temperature=0, max_tokens=asked.output_tokens, ignore_eos=True),
            )
        while engine.has_requests:
            engine.step()
    assert len(records.found) == 40
    assert [r.output_tokens for r in records.found] != [1] * 40
    np.testing.assert_allclose(
        [r.first_token - r.arrived for r in records.found], simulated.ttft, rtol=1e-6
    )
    np.testing.assert_allclose(
        [r.finished - r.arrived for r in records.found], simulated.e2e, rtol=1e-6
    )


@given(st.integers(0, 1 << 20), st.sampled_from(["round_robin", "least_loaded", "prefix"]))
def test_every_request_gets_all_of_its_tokens_wherever_it_goes(seed, routing):
    mix = Mix(LENGTHS, tenants=3, priorities=2, prefix_tokens=9, prefix_groups=2, prefix_share=0.5)
    load = with_arrivals(random_load(mix, 60, seed), 2.0, 0.3, seed)
    measured = simulate(settings(num_blocks=20), load, replicas=3, routing=routing)
    assert len(measured.ttft) == 60
    assert measured.counts["output_tokens"] == load.rows["output_tokens"].sum()
    assert measured.counts["prompt_tokens"] == load.prompt_tokens.sum()
    computed = load.prompt_tokens + load.rows["output_tokens"] - 1
    again = measured.counts["recomputed_tokens"]
    assert measured.counts["computed_tokens"] <= computed.sum() + again
    assert (measured.ttft <= measured.e2e).all()
    assert (measured.queued <= measured.ttft).all()
    assert (measured.ttft >= 1).all()


def test_preemptions_are_counted_and_their_tokens_too():
    measured = simulate(settings(num_blocks=16), trace(*[(0.0, 10, 30)] * 4))
    assert measured.counts["preemptions"] > 0
    assert measured.counts["recomputed_tokens"] > 0
    assert (
        measured.counts["computed_tokens"]
        == 4 * 39 + measured.counts["recomputed_tokens"] - (measured.counts["cached_tokens"])
    )


def test_parts_make_up_the_whole():
    load = tenants_load(300, 3, 3.0)
    whole = simulate(settings(), load, replicas=5)
    parts = Measured.merge(
        [simulate(settings(), load, replicas=5, part=part, parts=2) for part in range(2)]
    )
    for name in ("ttft", "tpot", "e2e", "queued", "tenant"):
        np.testing.assert_array_equal(np.sort(getattr(parts, name)), np.sort(getattr(whole, name)))
    assert parts.counts == whole.counts
    assert parts.busy == pytest.approx(whole.busy)
    assert parts.ended == whole.ended
    assert {k: v for k, v in parts.service.items() if v} == {
        k: v for k, v in whole.service.items() if v
    }
    assert parts.backlogged == whole.backlogged


def test_processes_find_what_one_process_finds():
    load = tenants_load(200, 2, 3.0)
    sides = [settings(), settings(Fair)]
    told = []
    here = run_all(sides, load, Cluster(3), 1)
    apart = run_all(sides, load, Cluster(3), 4, told.append)
    for one, other in zip(here, apart, strict=True):
        assert one.measured.counts == other.measured.counts
        np.testing.assert_array_equal(np.sort(one.measured.ttft), np.sort(other.measured.ttft))
    assert told[-1] == [200, 200]


def test_an_error_in_a_process_is_the_users():
    load = trace((0.0, 4, 1))
    sides = [settings(), settings(Stuck)]
    with pytest.raises(PageloomError, match="tried: scheduling policy 'Stuck' makes no progress"):
        run_all(sides, load, Cluster(), 2)


class Stuck(FCFS):
    def schedule(self, view, plan):
        pass


def test_more_than_may_wait_are_refused():
    load = trace(*[(0.0, 4, 10)] * 10)
    measured = simulate(settings(max_waiting=3), load)
    assert measured.rejected.total() == 7
    assert len(measured.ttft) == 3


def test_the_least_loaded_replica_is_chosen_and_round_robin_does_not_care():
    load = trace((0.0, 4, 20), (0.0, 4, 1), (5.0, 4, 1), (6.5, 4, 20))
    one_by_one = simulate(settings(max_num_seqs=1), load, replicas=2)
    by_load = simulate(settings(max_num_seqs=1), load, replicas=2, routing="least_loaded")
    assert max(one_by_one.queued) > 10
    assert max(by_load.queued) < 2


def test_prompts_go_where_their_prefix_is():
    mix = Mix(UniformLengths((2, 6), (1, 4)), prefix_tokens=32, prefix_groups=8)
    load = with_arrivals(random_load(mix, 400, seed=1), 1.0, 1.0, seed=1)
    cached = {
        routing: simulate(settings(num_blocks=16), load, replicas=8, routing=routing).counts[
            "cached_tokens"
        ]
        for routing in ("round_robin", "least_loaded", "prefix")
    }
    # Each replica has room for one or two of the prefixes.
    assert cached["prefix"] > 1.5 * cached["round_robin"]
    assert cached["prefix"] > 0.9 * 32 * (400 - 8)


def test_a_busy_replica_is_passed_over_whatever_it_holds():
    mix = Mix(UniformLengths((2, 6), (20, 30)), prefix_tokens=16, prefix_groups=1)
    load = random_load(mix, 200, seed=1)
    measured = simulate(settings(), load, replicas=4, routing="prefix")
    alone = simulate(settings(), load)
    assert measured.ended < 0.35 * alone.ended
    assert MARGIN < 200 / 4


def test_given_prompts_share_what_they_have_in_common():
    prompt = tuple(range(40))
    load = trace_load(
        [TraceRequest(prompt, 2, arrival) for arrival in (0.0, 50.0, 51.0)], Path("trace")
    )
    measured = simulate(settings(), load, replicas=3, routing="prefix")
    assert measured.counts["cached_tokens"] == 2 * 36  # the last token is always computed


def test_fair_narrows_the_gap_between_tenants():
    load = tenants_load(600, 3, 5.0)
    gaps = {
        scheduler: service_gap(
            Outcome(tried := settings(scheduler), simulate(tried, load, window=20.0), 0.0)
        )
        for scheduler in (FCFS, Fair)
    }
    assert gaps[Fair] < 0.5 * gaps[FCFS]


def test_without_two_tenants_who_wait_there_is_no_gap():
    tried = settings()
    assert service_gap(Outcome(tried, simulate(tried, trace((0.0, 4, 4))), 0.0)) is None


def test_loads_depend_on_the_seed_alone():
    mix = Mix(LENGTHS, tenants=4, priorities=3, prefix_tokens=5, prefix_groups=2, prefix_share=0.4)
    one, same, other = (random_load(mix, 5000, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(one.rows, same.rows)
    assert (one.rows != other.rows).any()
    counts = np.bincount(one.rows["tenant"])
    assert counts[0] / counts[3] == pytest.approx(4, rel=0.25)
    assert (one.rows["group"] < 0).mean() == pytest.approx(0.6, abs=0.05)
    assert set(one.rows["priority"].tolist()) == {0, 1, 2}
    asked = next(asked for asked in one if asked.group == 1)
    assert list(one.prompt(7, asked))[:5] == [1] * 5
    assert isinstance(asked, Asked)


@pytest.mark.parametrize("burstiness", [0.2, 1.0, 5.0])
def test_arrivals_have_the_rate_and_the_burstiness_that_were_asked_for(burstiness):
    load = with_arrivals(random_load(Mix(LENGTHS), 20_000, 0), 4.0, burstiness, 0)
    assert load.rate == pytest.approx(4.0, rel=0.1)
    gaps = np.diff(load.rows["arrival"])
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(1 / burstiness, rel=0.2)


def test_the_sustained_rate_keeps_replicas_busy():
    load = random_load(Mix(LENGTHS), 3000, 0)
    rate = sustained_rate(settings(), load, Cluster(replicas=3))
    measured = simulate(settings(), with_arrivals(load, rate, 1, 0), replicas=3)
    assert 0.5 < measured.busy / (3 * measured.ended) <= 1


def test_texts_are_refused_since_there_is_no_tokenizer():
    with pytest.raises(PageloomError, match="trace has a prompt of text"):
        trace_load([TraceRequest("hello", 1)], Path("trace"))


@pytest.mark.parametrize(
    "limits", [{"max_model_len": 40}, {"num_blocks": 9}, {"enable_chunked_prefill": False}]
)
def test_a_request_that_cannot_be_served_is_named(limits):
    with pytest.raises(PageloomError, match="cannot serve request 2, of 30 prompt and 20 output"):
        settings(**limits).check(trace((0.0, 1, 1), (0.0, 30, 20)))
