"""Steps and outputs that travelled as bytes do what they do where they stay."""

from __future__ import annotations

import math

import numpy as np
import pytest

from pageloom import SamplingParams
from pageloom.config import load_config
from pageloom.contract import StepOutput
from pageloom.engine.assemble import assemble
from pageloom.engine.blueprint import EngineBlueprint
from pageloom.runner.sampler import SampleRow
from pageloom.runner.step import DrawRow, ScoreRow, Step, StepArrays
from pageloom.runner.wire import pack_output, pack_step, unpack_output, unpack_step
from pageloom.scheduling.logprobs import TokenLogprobs
from tiny_model import write_engine

PROMPTS = [[5, 6, 7, 8, 9, 10], [5, 6, 7, 8, 20], [30], [31, 32, 33]]
PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=8, logprobs=2),
    "drawn": SamplingParams(seed=3, top_k=20, top_p=0.9, min_p=0.01, n=3, max_tokens=6),
    "penalties": SamplingParams(
        temperature=0,
        repetition_penalty=1.3,
        presence_penalty=0.4,
        frequency_penalty=0.7,
        max_tokens=12,
    ),
    "biased": SamplingParams(
        temperature=0.7, seed=1, logit_bias={4: 5.0, 9: -100}, stop_token_ids=[11], min_tokens=4
    ),
    "scored": SamplingParams(temperature=0, prompt_logprobs=3, max_tokens=2),
    "beams": SamplingParams(beam_width=3, n=2, max_tokens=6),
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    path = write_engine(tmp_path_factory.mktemp("model"))

    def build(packed):
        # So small that requests give way: recomputed, and swapped where they have branches.
        given = ["kv_cache.num_blocks=14", "kv_cache.block_size=4", "attention.backend=torch_paged"]
        config = load_config(path, given)
        engine = assemble(config)
        if packed:
            send_as_bytes(engine, EngineBlueprint(config))
        return engine

    return build


def send_as_bytes(engine, blueprint):
    worker, outputs = engine.executor.worker, []

    def submit(step):
        outputs.append(worker.run_packed(blueprint.pack(step)))

    engine.executor.submit = submit
    engine.executor.receive = lambda: blueprint.unpack(outputs.pop())


@pytest.mark.parametrize("kind", [*PARAMS, "all"])
def test_outputs_do_not_depend_on_how_steps_travel(build, kind):
    params = list(PARAMS.values()) if kind == "all" else [PARAMS[kind]]
    prompts = [prompt for prompt in PROMPTS for _ in params]
    given = params * len(PROMPTS)
    here, there = (build(packed).generate(prompts, given) for packed in (False, True))
    assert there == here


def test_a_step_is_the_same_at_the_other_end():
    arrays = StepArrays(
        token_ids=np.array([7, 8, 9], dtype=np.int64),
        query_start=np.array([0, 1, 3], dtype=np.int32),
        seq_lens=np.array([12, 2], dtype=np.int32),
        block_tables=np.array([[4, 5, 6], [1, 0, 0]], dtype=np.int32),
    )
    sample = SampleRow(SamplingParams(seed=5), [1, 2], [3], frozenset([0]), 2, b"\x01\xff")
    step = Step(
        [1, 2],
        [12, 2],
        lambda: arrays,
        draws=[DrawRow(0, sample)],
        scored=[ScoreRow(1, 0, [8, 9], 4)],
        swapped_out=[(1, 2), (3, 4)],
        swapped_in=[(9, 8)],
        copies=[(6, 7)],
    )
    there = unpack_step(pack_step(step))
    for name in ("token_ids", "query_start", "seq_lens", "block_tables"):
        sent, came = getattr(arrays, name), getattr(there.arrays, name)
        assert came.dtype == sent.dtype
        assert came.flags.writeable
        assert (came == sent).all()
    assert (list(there.query_lens), list(there.seq_lens)) == ([1, 2], [12, 2])
    assert (there.swapped_out, there.swapped_in) == ([(1, 2), (3, 4)], [(9, 8)])
    assert (there.copies, there.scored) == ([(6, 7)], step.scored)
    (draw,) = there.draws
    assert (draw.sequence, draw.sample.index, draw.sample.mask) == (0, 2, b"\x01\xff")
    assert draw.sample.eos_token_ids == {0}
    assert len(draw.sample.output_token_ids) == 1
    assert draw.sample.params.seed == 5


def test_a_prompt_travels_only_if_a_penalty_reads_it():
    def size(**params):
        sample = SampleRow(SamplingParams(**params), list(range(5000)), [1] * 5000, ())
        arrays = StepArrays(*(np.zeros(1, dtype=np.int32) for _ in range(3)), np.zeros((1, 1)))
        return len(pack_step(Step([1], [1], lambda: arrays, draws=[DrawRow(0, sample)])))

    assert size(temperature=0.5) < 200
    assert size(repetition_penalty=1.1) > 10_000


def test_an_output_is_the_same_at_the_other_end():
    scores = [TokenLogprobs(1, -0.5, 1, ((1, -0.5), (2, -math.inf)))]
    output = StepOutput(
        token_ids=[4, 0],
        logprobs=[None, scores[0]],
        failures={1: "why"},
        candidates=[[(3, -0.25)], None],
        scores=[scores, []],
    )
    assert unpack_output(pack_output(output)) == output


def test_a_step_without_sequences_only_moves_blocks():
    empty = np.zeros(0, dtype=np.int32)
    arrays = StepArrays(empty, np.zeros(1, dtype=np.int32), empty, np.zeros((0, 0), dtype=np.int32))
    there = unpack_step(pack_step(Step([], [], lambda: arrays, copies=[(1, 2)])))
    assert (there.query_lens, there.copies) == ([], [(1, 2)])
