"""Beam search on the demo model equals ``transformers.generate(num_beams=...)`` in float32."""

from __future__ import annotations

import pytest
import torch
from test_demo_against_transformers import CHAT, CONFIG, TEXTS, load_reference

from pageloom import Engine, SamplingParams
from pageloom.engine.stats import EngineStats

MAX_TOKENS = 20
TOLERANCE = 1e-4  # of a score; the sums of some 20 log-probabilities differ by less
PROMPTS = [*TEXTS[:2], "1, 2, 3, 4,", TEXTS[2][:600]]


@pytest.fixture(scope="module")
def model():
    return load_reference(torch.float32).model


@pytest.fixture(scope="module")
def expected(model):
    """Token ids and scores of all returned beams, per prompt."""
    known = {}

    def expected(token_ids, width, **options):
        key = (tuple(token_ids), width, *options.items())
        if key not in known:
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor([token_ids]),
                    attention_mask=torch.ones(1, len(token_ids), dtype=torch.int64),
                    num_beams=width,
                    num_return_sequences=width,
                    max_new_tokens=MAX_TOKENS,
                    do_sample=False,
                    pad_token_id=0,
                    return_dict_in_generate=True,
                    output_scores=True,
                    **options,
                )
            ends = model.generation_config.eos_token_id
            ends = [ends] if isinstance(ends, int) else ends
            known[key] = [
                (_until(row.tolist()[len(token_ids) :], ends), score)
                for row, score in zip(
                    output.sequences, output.sequences_scores.tolist(), strict=True
                )
            ]
        return known[key]

    return expected


def _until(token_ids, ends):
    """Without the padding behind the first end."""
    at = next((i for i, token in enumerate(token_ids) if token in ends), len(token_ids) - 1)
    return token_ids[: at + 1]


def build(*overrides):
    return Engine.from_config(
        CONFIG,
        [
            "model.dtype=float32",
            "model.max_model_len=512",
            "runtime.num_threads=1",
            "runtime.debug=true",
            *overrides,
        ],
    )


def check(engine, expected, width, **options):
    params = SamplingParams(beam_width=width, n=width, max_tokens=MAX_TOKENS, **options)
    prompts = [engine.render_chat(CHAT), *PROMPTS]
    outputs = engine.generate(prompts, params)
    for output in outputs:
        wanted = expected(output.prompt_token_ids, width, **options)
        found = [(beam.token_ids, beam.score) for beam in output.outputs]
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in wanted]
        for (_, score), (_, wanted_score) in zip(found, wanted, strict=True):
            assert score == pytest.approx(wanted_score, abs=TOLERANCE)
        texts = [engine.tokenizer.decode(t, skip_special_tokens=True) for t, _ in wanted]
        assert [beam.text for beam in output.outputs] == texts


ROOMY = "kv_cache.memory=64MiB"
CHUNKED = ("scheduler.max_num_batched_tokens=64",)
WHOLE = ("scheduler.enable_chunked_prefill=false",)


@pytest.mark.parametrize(
    ("width", "prefill"),
    [(2, CHUNKED), (4, WHOLE), (6, CHUNKED)],
    ids=["2 chunked", "4 whole", "6 chunked"],
)
def test_beams_are_those_of_transformers(width, prefill, expected):
    check(build(ROOMY, *prefill), expected, width)


@pytest.mark.parametrize(
    ("mode", "caching"), [("swap", "true"), ("swap", "false"), ("recompute", "false")]
)
def test_beams_under_preemption(mode, caching, expected):
    engine = build(
        *CHUNKED,
        f"scheduler.preemption_mode={mode}",
        f"kv_cache.enable_prefix_caching={caching}",
        "kv_cache.memory=null",
        "kv_cache.num_blocks=56",
        "kv_cache.block_size=8",
    )
    stats = EngineStats()
    engine.plugins.register_observer(stats)
    check(engine, expected, 4)
    assert stats.preemptions > 0, "the pool is meant to be too small"
