"""An engine with several steps under way: what it says, what is told of its steps, and what becomes
of those that nobody waits for any more."""

from __future__ import annotations

from collections import deque
from types import SimpleNamespace

import pytest
import torch
from seen import Records

from pageloom import SamplingParams
from pageloom.contract import Alone, Rank
from pageloom.engine import capacity
from pageloom.errors import PageloomError
from pageloom_executors.local import LocalExecutor
from pageloom_executors.torch_distributed import TorchDistributedExecutor

LONG = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
SAMPLES = SamplingParams(n=3, seed=3, max_tokens=12, ignore_eos=True)
BEAMS = SamplingParams(beam_width=3, n=2, max_tokens=12, ignore_eos=True)
ALIKE = [5] * 12


class Ahead(LocalExecutor):
    """Computes a step only when it is received, as far as anyone can tell from outside."""

    max_in_flight = 2

    def start(self, blueprint):
        self.blueprint, self.messages = blueprint, deque()
        return super().start(blueprint)

    def submit(self, step):
        self.messages.append(self.blueprint.pack(step))

    def receive(self):
        return self.blueprint.unpack(self.worker.run_packed(self.messages.popleft()))


@pytest.fixture
def ahead(build, monkeypatch):
    def ahead(in_flight=2, **overrides):
        monkeypatch.setattr(Ahead, "max_in_flight", in_flight)
        with monkeypatch.context() as patch:
            patch.setattr("pageloom_executors.local.LocalExecutor", Ahead)
            engine = build(kv_cache__block_size=4, attention__backend="torch_paged", **overrides)
        assert isinstance(engine.executor, Ahead)
        return engine

    return ahead


@pytest.mark.parametrize("in_flight", [2, 3])
@pytest.mark.parametrize("blocks", [20, 200])
def test_outputs_are_those_of_one_step_after_the_other(build, ahead, in_flight, blocks):
    prompts = [[*ALIKE, 1], [*ALIKE, 2, 3], [*ALIKE, 4], [7] * 20, [8], [9, 9]]
    params = [LONG, SAMPLES, BEAMS, LONG, SAMPLES, LONG]
    one = build(kv_cache__block_size=4, attention__backend="torch_paged")
    several = ahead(in_flight, kv_cache__num_blocks=blocks)
    records = Records(several)
    expected = [output.outputs for output in one.generate(prompts, params)]
    assert [output.outputs for output in several.generate(prompts, params)] == expected
    told, counted = (
        sum(step.preempted for step in records.steps),
        sum(request.preemptions for request in records.requests),
    )
    assert told == counted
    assert bool(counted) == (blocks == 20)
    several.planner.check_integrity()


def test_the_times_of_steps_do_not_overlap(ahead):
    engine = ahead()
    records = Records(engine)
    engine.generate([[1, 2], [3, 4]], LONG)
    assert len(records.steps) > 12
    for before, after in zip(records.steps, records.steps[1:], strict=False):
        assert before.finished <= after.started <= after.finished


def test_a_step_is_not_said_to_hold_who_ended_before_it(ahead):
    engine = ahead()
    records = Records(engine)
    engine.generate([[1, 2], [3, 4]], LONG)
    assert records.steps[0].num_running == 2
    assert records.steps[-1].num_running == 1


def test_idle_time_is_not_that_of_a_step_left_over(ahead):
    engine = ahead()
    records = Records(engine)
    opened = [engine.open_request([n], LONG) for n in (1, 2)]
    for _ in range(4):
        engine.advance()
    for request in opened:
        engine.close(request)
    seen, now = len(records.steps), engine.planner.clock()
    engine.generate([3], LONG)
    assert all(step.started >= now for step in records.steps[seen:])


def test_nothing_in_flight_is_found_after_a_reset(ahead):
    engine = ahead(3, scheduler__max_num_batched_tokens=8)
    prompt = list(range(1, 25))
    first = engine.open_request(prompt, LONG)
    other = engine.open_request([40], LONG)
    engine.advance()
    engine.reset_prefix_cache()
    for request in (first, other):
        while not request.finished:
            engine.advance()
    assert engine.generate(prompt, LONG)[0].cached_tokens == 0
    assert engine.generate(prompt, LONG)[0].cached_tokens > 0


class BadGuide:
    """Fails as none should."""

    finished = False

    def mask(self):
        raise RuntimeError("no mask today")

    def fork(self):
        return self

    def advance(self, token_id): ...


def test_a_step_that_cannot_be_described_leaves_no_trace(ahead):
    engine = ahead()
    engine.open_request([1, 2], LONG, guide=BadGuide())
    with pytest.raises(RuntimeError, match="no mask today"):
        engine.advance()
    assert not engine.has_requests
    assert len(engine.generate([1, 2], LONG)[0].outputs[0].token_ids) == 12


def test_a_stage_without_a_head_finds_its_budget(monkeypatch):
    """On a GPU, each rank runs the largest step once to see what it takes."""

    def no_head(hidden):
        raise AssertionError("a stage that is not the last has no logits")

    model = SimpleNamespace(
        group=SimpleNamespace(rank=Rank.of(0, 1, 2)),
        forward=lambda tokens, positions, attend: tokens[:, None].float(),
        logits=no_head,
    )
    for name, value in {
        "reset_peak_memory_stats": None,
        "memory_allocated": 100,
        "max_memory_allocated": 150,
        "synchronize": None,
        "empty_cache": None,
        "mem_get_info": (900, 1000),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    config = SimpleNamespace(
        scheduler=SimpleNamespace(max_num_batched_tokens=8, max_num_seqs=4),
        kv_cache=SimpleNamespace(gpu_memory_utilization=0.9),
    )
    found = capacity._cuda_budget(config, model, torch.device("cpu"))
    assert found == (900 - 100 - 50, 50)
    model.group = Alone()
    with pytest.raises(AssertionError, match="not the last"):
        capacity._cuda_budget(config, model, torch.device("cpu"))


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"parallel__pipeline_parallel_size": 1024}, "2 layers .*pipeline_parallel_size"),
        ({"parallel__tensor_parallel_size": 5}, "2 key-value heads .* 5"),
    ],
)
def test_no_process_is_started_for_a_division_that_is_impossible(
    build, monkeypatch, overrides, reason
):
    monkeypatch.setattr(TorchDistributedExecutor, "start", lambda *_: pytest.fail("started"))
    with pytest.raises(PageloomError, match=reason):
        build(**overrides)
