"""Every side does the same work, in turn, and what is taken down of it is true."""

from __future__ import annotations

from dataclasses import replace

import pytest

import pageloom.bench.serving.replay
from pageloom import Engine
from pageloom.bench.serving.compare import build_sides, prepare, run_rounds, warm_up
from pageloom.bench.serving.replay import Client
from pageloom.bench.serving.trace import TraceRequest, draw_token_ids, random_trace
from pageloom.errors import PageloomError


def short_trace(requests=12, **options):
    options = {"prompt_tokens": (4, 20), "output_tokens": (2, 12)} | options
    return random_trace(requests, **options)


def build(paths, *overrides):
    return build_sides(paths, overrides, on_build=lambda name: None)


@pytest.fixture(scope="module")
def sides(contiguous, paged):
    return build([contiguous, paged])


@pytest.fixture(scope="module")
def client(paged):
    return Client(Engine.from_config(paged))


class Clock:
    """By which a step takes a tenth of a second, and nothing else takes any time."""

    def __init__(self):
        self.now = 100.0
        self.slept = 0.0

    def monotonic(self):
        self.now += 1e-6  # no two moments are the same
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.slept += seconds


@pytest.fixture
def clock(client, monkeypatch):
    clock, advance = Clock(), client.engine.advance

    def advance_by_the_clock():
        clock.now += 0.1
        advance()

    monkeypatch.setattr(client.engine, "advance", advance_by_the_clock)
    monkeypatch.setattr(client.engine.planner, "clock", clock.monotonic)
    monkeypatch.setattr(pageloom.bench.serving.replay, "time", clock)
    return clock


def test_a_replay_takes_down_each_request(client, clock):
    trace = draw_token_ids(short_trace(), 96)
    finished = []
    before = clock.now
    replay = client.replay(trace, on_finished=lambda: finished.append(clock.now - before))
    wall = clock.now - before
    assert [request.output_tokens for request in replay.requests] == [
        request.output_tokens for request in trace
    ]
    assert [request.prompt_tokens for request in replay.requests] == [
        len(request.prompt) for request in trace
    ]
    for request in replay.requests:
        assert 0 <= request.first_scheduled < request.first_token < request.finished
        assert request.finished <= replay.seconds <= wall
    at = sorted(request.finished for request in replay.requests)
    assert at == pytest.approx(finished, abs=1e-3)
    assert at[-1] == pytest.approx(replay.seconds, abs=1e-3)
    total = sum(request.output_tokens for request in trace)
    assert replay.tokens_per_second == pytest.approx(total / replay.seconds)
    # Every prompt token once, and every output token but the last of each request.
    prompts = sum(len(request.prompt) for request in trace)
    assert replay.stats.computed_tokens == prompts + total - len(trace)


def test_latencies_are_those_that_a_client_sees(client, clock, monkeypatch):
    """TTFT and TPOT equal what the times of delivery give."""
    seen = []
    open_request = client.engine.open_request

    def open_and_listen(prompt, params, **options):
        options["deliver"] = lambda chunk: seen.append(clock.now)
        return open_request(prompt, params, **options)

    monkeypatch.setattr(client.engine, "open_request", open_and_listen)
    start = clock.now
    (served,) = client.replay([TraceRequest((1, 2, 3), 4)]).requests
    assert len(seen) == 4
    assert 0.1 <= served.ttft == pytest.approx(seen[0] - start, abs=1e-3)
    assert 0.1 <= served.tpot == pytest.approx((seen[-1] - seen[0]) / 3, abs=1e-3)


def test_a_request_of_one_token_has_no_tpot(client):
    (served,) = client.replay([TraceRequest((1, 2, 3), 1)]).requests
    assert served.tpot is None
    assert served.ttft > 0


def test_requests_come_when_the_trace_says(client, clock):
    trace = [TraceRequest((5, 6, 7), 3, arrival) for arrival in (0.0, 0.5, 1.0)]
    replay = client.replay(trace)
    assert [request.arrival for request in replay.requests] == [0.0, 0.5, 1.0]
    assert all(request.first_scheduled >= request.arrival for request in replay.requests)
    assert replay.seconds == pytest.approx(1.3, abs=1e-3)
    assert replay.stats.peak_running == 1
    assert clock.slept == pytest.approx(0.4, abs=1e-3)


@pytest.mark.usefixtures("clock")
def test_a_request_that_comes_during_a_step_has_waited_from_when_it_came(client):
    trace = [TraceRequest((1, 2), 2), TraceRequest((1, 2), 1, arrival=0.01)]
    first, second = client.replay(trace).requests
    assert first.ttft == pytest.approx(0.1, abs=1e-3)
    assert second.first_scheduled == pytest.approx(0.2, abs=1e-3)
    assert second.ttft == second.first_token - 0.01
    assert second.ttft == pytest.approx(0.19, abs=1e-3)


def test_a_side_that_does_other_work_stops_the_comparison(client, monkeypatch):
    opened = client.engine.open_request

    def open_shorter(prompt, params, **options):
        return opened(prompt, replace(params, max_tokens=2), **options)

    monkeypatch.setattr(client.engine, "open_request", open_shorter)
    with pytest.raises(PageloomError, match="request 2 of the trace ended with 2 output tokens"):
        client.replay([TraceRequest((1, 2), 2), TraceRequest((1, 2), 5)])


def test_each_round_runs_every_side_once_and_another_first(sides, contiguous, paged):
    three = [*sides, *build([contiguous])]
    trace = prepare(short_trace(4), three, seed=0)
    turns = []
    rounds = list(
        run_rounds(three, trace, 4, on_turn=lambda number, side: turns.append((number, side)))
    )
    order = [[three.index(side) for n, side in turns if n == number] for number in range(4)]
    assert order == [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]
    assert [list(done) for done in rounds[:2]] == [
        ["contiguous", "paged"], ["paged", "contiguous"]
    ]  # fmt: skip


def test_one_round_of_two_sides(sides):
    trace = prepare(short_trace(), sides, seed=0)
    for side in sides:
        warm_up(side, trace)
    (done,) = run_rounds(sides, trace, 1)
    contiguous, paged = done["contiguous"], done["paged"]
    assert contiguous.stats.output_tokens == paged.stats.output_tokens
    assert contiguous.stats.peak_running == 4  # slabs
    assert paged.stats.peak_running > 4
    assert paged.stats.mean_running > contiguous.stats.mean_running
    assert contiguous.stats.kv_utilization < 0.5 < paged.stats.kv_utilization <= 1


def test_prefixes_are_found_again_within_a_turn_and_not_after_it(paged, config):
    off = config("uncached", kv_cache={"enable_prefix_caching": False})
    sides = build([paged, off])
    trace = prepare(short_trace(8, prefix_tokens=32), sides, seed=0)
    total = sum(len(request.prompt) for request in trace)
    for done in run_rounds(sides, trace, 2):
        assert done["uncached"].stats.cached_tokens == 0
        first, *others = done["paged"].requests
        assert first.cached_tokens == 0
        assert others[-1].cached_tokens >= 32
        assert done["paged"].stats.cached_share == pytest.approx(
            sum(request.cached_tokens for request in others) / total
        )
    (kept,) = run_rounds(sides, trace, 1, keep_prefix_cache=True)
    assert kept["paged"].requests[0].cached_tokens >= 32


def test_memory_pressure_shows_as_preemptions_and_recomputed_tokens(config):
    (side,) = build([config("crowded", kv_cache={"num_blocks": 16})])
    trace = prepare(short_trace(output_tokens=(20, 30)), [side], seed=0)
    (done,) = run_rounds([side], trace, 1)
    stats = done["crowded"].stats
    assert stats.preemptions > 0
    assert stats.preemptions == sum(request.preemptions for request in done["crowded"].requests)
    useful = sum(len(request.prompt) + request.output_tokens - 1 for request in trace)
    assert stats.computed_tokens == useful + stats.recomputed_tokens
    assert 0 < stats.recomputed_share < 1


def test_what_a_config_cannot_serve_is_said_before_anything_runs(sides, config, monkeypatch):
    monkeypatch.setattr(Engine, "advance", lambda engine: pytest.fail("it ran"))
    narrow = build([config("narrow", model={"max_model_len": 16})])
    small = build([config("small", kv_cache={"num_blocks": 4})])
    fits, too_long = TraceRequest((1, 2, 3), 4), TraceRequest((1,) * 14, 4)
    assert len(prepare([fits], [*sides, *narrow, *small], seed=0)) == 1
    for side, reason in (
        (narrow, "14 prompt and 4 output tokens are more than its max_model_len, 16"),
        (small, "may need 5 KV blocks"),
    ):
        with pytest.raises(PageloomError) as raised:
            prepare([fits, too_long], [*sides, *side], seed=0)
        assert f"{side[0].name}.yaml cannot serve request 2 of the trace: " in str(raised.value)
        assert reason in str(raised.value)
    assert not any(side.engine.has_requests for side in (*sides, *narrow, *small))


def test_threads_belong_to_the_process(paged, config):
    two = config("two", runtime={"num_threads": 2})
    with pytest.raises(PageloomError, match=r"num_threads is 1 in .*paged.yaml, 2 in .*two.yaml"):
        build([paged, two])
    assert len(build([paged, two], "runtime.num_threads=1")) == 2


def test_a_config_that_cannot_be_built_is_named(paged, config):
    broken = config("broken", model={"path": "/nowhere"})
    with pytest.raises(PageloomError, match=r"broken\.yaml: model /nowhere.*beside paged"):
        build([paged, broken])


def test_sides_have_short_names_that_differ(paged, contiguous, tmp_path):
    assert [side.name for side in build([paged, contiguous])] == ["paged", "contiguous"]
    assert [side.name for side in build([paged, paged])] == ["paged", "paged (2)"]
    other = tmp_path / "paged.yaml"
    other.write_text(f"extends: {paged}\n")
    assert [side.name for side in build([paged, str(other)])] == [paged, str(other)]
