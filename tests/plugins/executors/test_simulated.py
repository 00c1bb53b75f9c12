"""The executor that runs no model: made-up tokens, on a clock of its own."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from pageloom.config.rules import parse_size
from pageloom.contract import RequestRecord, WorkerError, WorkerReport, hookimpl
from pageloom.contract.costs import StepCosts, StepProfile
from pageloom.engine.engine import Engine
from pageloom.errors import PageloomError
from pageloom.scheduling import SamplingParams
from pageloom_executors.simulated import SimulatedExecutor
from tiny_model import VOCAB, write_engine


def blueprint(world_size=1, **config):
    return SimpleNamespace(world_size=world_size, state=lambda: {"config": config})


BLUEPRINT = blueprint()
WORKER = WorkerReport("llama", "cpu", "bfloat16", 1000, 256, "paged", 8, 64, 32, 4, {}, None)


def executor(**options):
    made = SimulatedExecutor(SimulatedExecutor.Config(**options))
    made.start(BLUEPRINT)
    return made


def step(query_lens=(1,), seq_lens=(5,), draws=1, candidates=(), scored=()):
    return SimpleNamespace(
        query_lens=query_lens, seq_lens=seq_lens, num_draws=draws, num_candidates=candidates,
        num_scored=scored, swapped_out=(), swapped_in=(), copies=(),
    )  # fmt: skip


def test_the_clock_moves_by_what_steps_cost_and_by_nothing_else():
    made = executor(costs={"constant": 0.5, "decode_context": 0.25, "prefill_pair": 1.0})
    assert made.clock() == 0.0
    made.submit(step([1, 2], [4, 2], draws=2))
    assert made.clock() == 0.5 + 4 * 0.25 + 3
    made.receive()
    assert made.clock() == 0.5 + 4 * 0.25 + 3


def test_the_costs_and_the_report_are_the_profiles_unless_options_say_otherwise(tmp_path):
    path = tmp_path / "profile.json"
    costs = StepCosts(constant=2.0, tokens=((1, 0.0), (2, 1.0)), draw=0.5)
    StepProfile(costs, WORKER, {}).write(path)
    made = SimulatedExecutor(SimulatedExecutor.Config(profile=str(path), costs={"draw": 0.125}))
    (report,) = made.start(BLUEPRINT)
    assert report == WORKER
    made.submit(step([2], [2], draws=1))
    assert made.clock() == 2.0 + 1.0 + 0.125
    changed = SimulatedExecutor(SimulatedExecutor.Config(profile=str(path), num_blocks=7))
    reports = changed.start(blueprint(2))
    assert [report.num_blocks for report in reports] == [7, 7]
    assert sum(report.bytes_per_block for report in reports) == 64
    assert reports[0].max_model_len == 256


def report_of(config, **options):
    return SimulatedExecutor(SimulatedExecutor.Config(**options)).start(blueprint(**config))[0]


@pytest.fixture
def profile(tmp_path):
    """Of 32 blocks of 8 tokens and 64 bytes."""
    path = tmp_path / "profile.json"
    StepProfile(StepCosts(), WORKER, {"quantizer": None}).write(path)
    return str(path)


def test_options_win_over_the_configuration_and_that_over_the_profile(profile):
    config = {
        "model": {"max_model_len": 100},
        "kv_cache": {"num_blocks": 9, "block_size": 32, "memory": "1GiB", "quantizer": None},
    }
    for more in ({}, {"profile": profile}):
        report = report_of(config, **more)
        assert (report.num_blocks, report.block_size, report.max_model_len) == (9, 32, 100)
        report = report_of(config, num_blocks=5, block_size=4, max_model_len=50, **more)
        assert (report.num_blocks, report.block_size, report.max_model_len) == (5, 4, 50)
    nothing = {
        "model": {"max_model_len": None},
        "kv_cache": dict.fromkeys(("num_blocks", "block_size", "memory", "quantizer")),
    }
    assert report_of(nothing, profile=profile) == WORKER


def test_a_profiles_memory_is_divided_into_blocks_of_the_configured_size(profile):
    report = report_of({"kv_cache": {"block_size": 32}}, profile=profile)
    assert (report.num_blocks, report.bytes_per_block, report.host_blocks) == (8, 256, 1)
    with pytest.raises(ValueError, match="no KV block of 512 tokens fits"):
        report_of({"kv_cache": {"block_size": 512}}, profile=profile)


@pytest.mark.parametrize(
    ("cache", "num_blocks"),
    [
        ({"memory": 6400}, 100),
        ({"memory": "1KiB"}, 16),
        ({"memory": "1KiB", "block_size": 16}, 8),
        ({"memory": "1GiB", "num_blocks": 3}, 3),
    ],
)
def test_memory_is_as_many_blocks_as_fit(profile, cache, num_blocks):
    assert report_of({"kv_cache": cache}, profile=profile).num_blocks == num_blocks


@pytest.mark.parametrize(
    "size", ["4GiB", "512 MiB", "2GB", "100B", "1.1tib", "0.3KiB", "6.5kb", "7000", 2**30]
)
def test_memory_is_read_as_the_configuration_reads_it(tmp_path, size):
    path = tmp_path / "bytes.json"
    worker = replace(WORKER, bytes_per_block=1)
    StepProfile(StepCosts(), worker, {}).write(path)
    report = report_of({"kv_cache": {"memory": size}}, profile=str(path))
    assert report.num_blocks == parse_size(size)


def test_memory_that_is_of_no_known_number_of_blocks_is_refused(profile, tmp_path):
    with pytest.raises(ValueError, match="no KV block of 8 tokens fits"):
        report_of({"kv_cache": {"memory": 63}}, profile=profile)
    unknown = tmp_path / "unknown.json"
    StepProfile(StepCosts(), replace(WORKER, bytes_per_block=0), {}).write(unknown)
    config = {"kv_cache": {"memory": "1GiB"}}
    for path in (None, str(unknown)):
        with pytest.raises(ValueError, match=r"memory is 1GiB, but no profile .*num_blocks inst"):
            report_of(config, profile=path)
        assert report_of(config, profile=path, num_blocks=2).num_blocks == 2


def test_a_quantizer_is_refused_unless_the_profile_was_measured_with_it(profile, tmp_path):
    path = str(tmp_path / "fp8.json")
    StepProfile(StepCosts(), WORKER, {"quantizer": "fp8_e4m3"}).write(tmp_path / "fp8.json")
    fp8 = {"kv_cache": {"quantizer": "fp8_e4m3"}}
    assert report_of(fp8, profile=path) == WORKER
    with pytest.raises(ValueError, match=r"is null, .*fp8\.json was measured with fp8_e4m3"):
        report_of({}, profile=path)
    with pytest.raises(ValueError, match=r"is fp8_e4m3, .*profile\.json was measured with null"):
        report_of(fp8, profile=profile)
    with pytest.raises(ValueError, match=r"is fp8_e4m3, but without a profile"):
        report_of(fp8)


def test_beams_cost_as_draws_do():
    costs = {"draw": 1.0}
    made, other = executor(costs=costs), executor(costs=costs)
    made.submit(step(draws=3))
    other.submit(step(draws=0, candidates=[4, 4, 4]))
    assert made.clock() == other.clock() == 3.0


def test_tokens_are_valid_and_the_same_again():
    first, second = executor(vocab_size=100), executor(vocab_size=100)
    drawn = []
    for made in (first, second):
        made.submit(step(draws=40))
        made.submit(step(draws=2))
        drawn.append([made.receive().token_ids, made.receive().token_ids])
    assert drawn[0] == drawn[1]
    assert [len(token_ids) for token_ids in drawn[0]] == [40, 2]
    assert all(25 <= token_id < 75 for token_id in drawn[0][0])
    assert len(set(drawn[0][0])) == 40


def test_candidates_are_different_tokens_the_likeliest_first():
    made = executor(vocab_size=10)
    made.submit(step(draws=0, candidates=[8, 3]))
    candidates = made.receive().candidates
    assert [len(found) for found in candidates] == [8, 3]
    for found in candidates:
        token_ids, logprobs = zip(*found, strict=True)
        assert len(set(token_ids)) == len(token_ids)
        assert all(0 <= token_id < 10 for token_id in token_ids)
        assert list(logprobs) == sorted(logprobs, reverse=True)
        assert max(logprobs) < 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 0}, "vocab_size must be 1 or more, not 0"),
        ({"costs": {"constants": 1.0}}, "there is no cost 'constants'"),
        ({"costs": {"constant": -1.0}}, "0 or more"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        SimulatedExecutor.Config(**options)


def test_before_the_start_and_after_the_end_nothing_runs():
    made = SimulatedExecutor(SimulatedExecutor.Config())
    with pytest.raises(WorkerError, match="not started"):
        made.submit(step())
    made.start(BLUEPRINT)
    made.allocate(10, 0)
    made.submit(step())
    made.close()
    made.close()
    with pytest.raises(WorkerError, match="closed"):
        made.receive()


class Records:
    def __init__(self):
        self.found: list[RequestRecord] = []

    @hookimpl
    def request_finished(self, record: RequestRecord):
        self.found.append(record)


def simulated(folder, options):
    return write_engine(folder, f"parallel: {{executor: simulated, options: {options}}}\n")


def test_an_engine_tells_times_by_the_virtual_clock(tmp_path):
    records = Records()
    with Engine.from_config(
        simulated(tmp_path, "{costs: {constant: 2.0}, vocab_size: 96, max_model_len: 64}")
    ) as engine:
        engine.plugins.register_observer(records)
        params = SamplingParams(max_tokens=5)
        outputs = engine.generate([[1, 2, 3], [4, 5]], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [5, 5]
    assert all(token < VOCAB for output in outputs for token in output.outputs[0].token_ids)
    for record in records.found:
        assert (record.arrived, record.first_token, record.finished) == (0.0, 2.0, 10.0)


def test_an_engine_has_the_blocks_and_lengths_of_its_configuration(tmp_path):
    path = simulated(tmp_path, "{vocab_size: 96}")
    sizes = ["kv_cache.num_blocks=9", "kv_cache.block_size=32", "model.max_model_len=50"]
    with Engine.from_config(path, sizes) as engine:
        info = engine.info
        assert (info.num_blocks, info.block_size, info.max_model_len) == (9, 32, 50)
    with pytest.raises(PageloomError, match=r"kv_cache\.quantizer is fp8_e4m3"):
        Engine.from_config(path, [*sizes, "kv_cache.quantizer=fp8_e4m3"])


def test_an_engine_of_several_ranks_takes_what_the_profile_says(tmp_path):
    path = simulated(tmp_path, "{vocab_size: 96}")
    with Engine.from_config(path, ["parallel.tensor_parallel_size=2"]) as engine:
        (output,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=3))
        assert engine.info.bytes_per_block == 1
    assert len(output.outputs[0].token_ids) == 3


def test_an_engine_searches_samples_and_scores_without_a_model(tmp_path):
    with Engine.from_config(simulated(tmp_path, "{vocab_size: 96}")) as engine:
        beams, samples, scored = engine.generate(
            [[1, 2, 3]] * 3,
            [
                SamplingParams(beam_width=3, n=2, max_tokens=4),
                SamplingParams(n=3, max_tokens=4),
                SamplingParams(max_tokens=2, prompt_logprobs=0),
            ],
        )
    assert [len(output.token_ids) for output in beams.outputs] == [4, 4]
    assert [len(output.token_ids) for output in samples.outputs] == [4, 4, 4]
    assert len(scored.prompt_logprobs) == 3


def test_a_profile_that_is_not_there_is_one_sentence(tmp_path):
    with pytest.raises(PageloomError, match=r"none\.json cannot be read"):
        Engine.from_config(simulated(tmp_path, "{profile: none.json}"))


def test_no_weights_are_looked_for(tmp_path):
    path = simulated(tmp_path, "{vocab_size: 96}")
    assert not list(tmp_path.glob("*.safetensors"))
    overrides = ["model.loader=hf", "model.options={}"]
    with Engine.from_config(path, overrides) as engine:
        (output,) = engine.generate([1, 2, 3], SamplingParams(max_tokens=3))
        assert len(output.outputs[0].token_ids) == 3
    with pytest.raises(PageloomError):
        Engine.from_config(path, [*overrides, "parallel.executor=local", "parallel.options={}"])
