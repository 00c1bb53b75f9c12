"""An engine on several ranks says what it says on one, in a part of the memory each; and when a
rank is lost, no request hangs and no process is left."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest
from seen import Seen

from pageloom import Engine, SamplingParams
from pageloom.config import load_config
from pageloom.contract import Alone, WorkerError
from pageloom.engine.blueprint import EngineBlueprint
from pageloom.errors import PageloomError
from pageloom_executors.torch_distributed import TorchDistributedExecutor
from tiny_model import write_engine, write_model

LAYOUTS = {"tensor": (2, 1), "pipeline": (1, 2), "both": (2, 2)}
COMMON = [5] * 12
LENGTH = {"max_tokens": 12, "ignore_eos": True}
GREEDY = SamplingParams(temperature=0, **LENGTH)
SAMPLES = SamplingParams(n=3, temperature=0.8, seed=3, **LENGTH)
BEAMS = SamplingParams(beam_width=3, n=3, **LENGTH)
REQUESTS = [
    ([*COMMON, 7, 8, 9], GREEDY),
    ([*COMMON, 7, 8, 9, 1], SAMPLES),
    ([*COMMON, 4], BEAMS),
    (list(range(1, 30)), GREEDY),
    ([9] * 17, SAMPLES),
]
SMALL = ["kv_cache.block_size=4", "kv_cache.num_blocks=20"]
SETTINGS = {
    "cached": ["kv_cache.block_size=4", "kv_cache.num_blocks=80"],
    "recomputed in chunks": [
        *SMALL,
        "scheduler.preemption_mode=recompute",
        "scheduler.max_num_batched_tokens=7",
    ],
    "swapped in FP8": [
        *SMALL,
        "scheduler.preemption_mode=swap",
        "attention.backend=torch_paged",
        "kv_cache.quantizer=fp8_e4m3_token_head",
    ],
}


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_engine(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def single(config):
    """The outputs of `REQUESTS` by an engine in one process, by setting."""
    known = {}

    def single(setting):
        if setting not in known:
            with Engine.from_config(config, SETTINGS[setting]) as engine:
                known[setting] = outputs(engine)
        return known[setting]

    return single


def divided(tensor, stages, *more):
    return [
        f"parallel.tensor_parallel_size={tensor}",
        f"parallel.pipeline_parallel_size={stages}",
        *more,
    ]


def outputs(engine):
    results = engine.generate(*map(list, zip(*REQUESTS, strict=True)))
    engine.planner.check_integrity()
    return [[completion.token_ids for completion in result.outputs] for result in results]


def rank_pids() -> list[int]:
    """Processes of ranks that this one has started and that are not reaped."""
    command = ["pgrep", "-P", str(os.getpid()), "-f", "pageloom_executors.rank"]
    return [
        int(pid) for pid in subprocess.run(command, capture_output=True, text=True).stdout.split()
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_outputs_with_cached_prefixes(config, single, layout):
    """And with samples, beams and copied blocks, all at the same time."""
    with Engine.from_config(config, divided(*LAYOUTS[layout], *SETTINGS["cached"])) as engine:
        seen = Seen()
        engine.plugins.register_observer(seen)
        assert outputs(engine) == single("cached")
        assert outputs(engine) == single("cached")
    assert seen.cached > 0
    assert seen.copied > 0
    assert rank_pids() == []


@pytest.mark.parametrize("setting", ["recomputed in chunks", "swapped in FP8"])
@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_outputs_of_preempted_requests_and_parts_of_prompts(config, single, layout, setting):
    with Engine.from_config(config, divided(*LAYOUTS[layout], *SETTINGS[setting])) as engine:
        seen = Seen()
        engine.plugins.register_observer(seen)
        assert outputs(engine) == single(setting)
    assert seen.preempted > 0
    assert (seen.swapped > 0) == setting.startswith("swapped")


def test_logprobs_and_penalties(config):
    """Which the rank that answers works out, of logits from all of its stage."""
    params = SamplingParams(
        temperature=0,
        logprobs=3,
        prompt_logprobs=2,
        repetition_penalty=1.3,
        frequency_penalty=0.5,
        logit_bias={7: 2.0},
        min_tokens=3,
        max_tokens=12,
    )
    found = []
    for overrides in ([], divided(2, 2)):
        with Engine.from_config(config, overrides) as engine:
            found.append(engine.generate([COMMON, list(range(1, 30))], params))
    for one, several in zip(*found, strict=True):
        assert several.outputs[0].token_ids == one.outputs[0].token_ids
        for ours, theirs in (
            (several.outputs[0].logprobs, one.outputs[0].logprobs),
            (several.prompt_logprobs[1:], one.prompt_logprobs[1:]),
        ):
            assert [[i for i, _ in e.top] for e in ours] == [[i for i, _ in e.top] for e in theirs]
            assert [e.logprob for e in ours] == pytest.approx([e.logprob for e in theirs], abs=1e-4)


@pytest.mark.parametrize("layout", ["tensor", "pipeline"])
def test_the_demo_model_says_the_same(engine, layout):
    """Which has three KV heads, and packed weights."""
    prompts = ["The capital of France is", "1, 2, 3, 4,", "Once upon a time"]
    params = SamplingParams(temperature=0, max_tokens=16)
    overrides = ["model.dtype=float32", "kv_cache.memory=64MiB", "runtime.num_threads=1"]
    overrides += divided(*LAYOUTS[layout])
    with Engine.from_config("configs/smollm2.yaml", overrides) as several:
        found = [output.outputs[0].text for output in several.generate(prompts, params)]
    assert found == [output.outputs[0].text for output in engine.generate(prompts, params)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rank_has_its_part_of_weights_and_cache(tmp_path, layout):
    """An even one: of each byte of a model that divides evenly, no more than 15 % twice."""
    config = write_engine(tmp_path)
    write_model(
        tmp_path,
        hidden_size=128,
        intermediate_size=256,
        num_attention_heads=8,
        num_key_value_heads=4,
        num_hidden_layers=4,
        vocab_size=512,
    )
    whole = size(blueprint(config).build(Alone()).report())
    executor = TorchDistributedExecutor(TorchDistributedExecutor.Config())
    try:
        reports = executor.start(blueprint(config, *divided(*LAYOUTS[layout])))
    finally:
        executor.close()
    ranks = LAYOUTS[layout][0] * LAYOUTS[layout][1]
    assert len(reports) == ranks
    assert max(map(size, reports)) <= whole / ranks * 1.15


def blueprint(config, *overrides):
    return EngineBlueprint(load_config(config, ["kv_cache.num_blocks=64", *overrides]))


def size(report):
    """Bytes of weights and cache."""
    return sum(report.weights.values()) + report.num_blocks * report.bytes_per_block


@pytest.mark.parametrize(
    ("layout", "number"),
    [("tensor", signal.SIGSTOP), ("pipeline", signal.SIGKILL), ("both", signal.SIGKILL)],
)
def test_when_a_rank_is_lost_every_request_ends_with_an_error(config, layout, number):
    """Whether it dies or hangs; and then the engine serves nobody, and leaves no process behind."""
    patience = "parallel.timeout_seconds=10" if number == signal.SIGSTOP else ""
    overrides = divided(*LAYOUTS[layout], *filter(None, [patience]))
    with Engine.from_config(config, overrides) as engine:
        opened = [engine.open_request(*request) for request in REQUESTS]
        for _ in range(4):
            engine.advance()
        lost = max(rank_pids())
        os.kill(lost, number)
        with pytest.raises(WorkerError, match=f"rank .*pid {lost}"):
            engine.generate([1, 2, 3], GREEDY)
        assert all(request.finished for request in opened)
        reasons = {
            chunk.finish_reason for each in opened for chunk in each.chunks if chunk.finish_reason
        }
        assert reasons == {"error"}
        with pytest.raises(WorkerError):
            engine.generate([1, 2, 3], GREEDY)
        with pytest.raises(WorkerError):
            engine.check_workers()
    assert rank_pids() == []


def test_a_rank_that_dies_while_nothing_is_asked_is_noticed(config):
    with Engine.from_config(config, divided(2, 1)) as engine:
        (lost, _) = sorted(rank_pids())
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(WorkerError, match=f"pid {lost}.* was ended by SIGKILL"):
            engine.generate([1, 2, 3], GREEDY)


def test_a_model_that_cannot_be_divided_is_one_clear_error(config):
    with pytest.raises(PageloomError) as caught:
        Engine.from_config(config, divided(1, 3))
    assert "\n" not in str(caught.value)
    assert rank_pids() == []


def test_what_ranks_find_missing_alike_is_said_once(config, caplog):
    overrides = ["attention.backend=torch_paged", "kv_cache.quantizer=fp8_e4m3"]
    with Engine.from_config(config, divided(2, 2, *overrides)):
        pass
    said = [record.getMessage() for record in caplog.records]
    assert sum("has no k_scale and v_scale" in message for message in said) == 1, said
