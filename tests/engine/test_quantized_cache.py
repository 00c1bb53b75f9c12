"""With every KV format, a request's output depends on the request alone, and blocks cost what the
format says."""

from __future__ import annotations

import json

import pytest
from seen import Seen

from pageloom import Engine, SamplingParams
from pageloom.config.errors import ConfigError
from pageloom.errors import PageloomError

# Codes of a static scale, such as the calibration of this model would give.
FORMATS = {
    "fp8_e4m3": {},
    "fp8_e5m2": {"k_scale": 0.5, "v_scale": 0.5},
    "int8": {"k_scale": 0.1, "v_scale": 0.1},
    "int4": {"k_scale": 1.5, "v_scale": 1.5},
    "fp8_e4m3_token_head": {},
    "fp8_e5m2_token_head": {},
    "int8_token_head": {},
    "int4_token_head": {},
}
HEADS, HEAD_SIZE, LAYERS = 2, 8, 2

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


@pytest.fixture
def quantized(build):
    """An engine with this format, and what is seen in it."""

    def quantized(name, **overrides):
        options = {f"kv_cache__options__{key}": value for key, value in FORMATS[name].items()}
        engine = build(
            attention__backend="torch_paged",
            kv_cache__quantizer=name,
            **{"kv_cache__num_blocks": 64, "kv_cache__block_size": 4, **options, **overrides},
        )
        seen = Seen()
        engine.plugins.register_observer(seen)
        return engine, seen

    return quantized


def outputs(engine, requests=REQUESTS):
    results = engine.generate(*map(list, zip(*requests, strict=True)))
    engine.planner.check_integrity()
    return [[completion.token_ids for completion in result.outputs] for result in results]


@pytest.fixture(scope="module")
def alone(build):
    """The outputs of `REQUESTS`, each alone, its prompt in one step, nothing cached."""
    known = {}

    def alone(name, quantized):
        if name not in known:
            engine, _ = quantized(name, kv_cache__enable_prefix_caching="false")
            known[name] = [outputs(engine, [request])[0] for request in REQUESTS]
        return known[name]

    return alone


@pytest.mark.parametrize("name", FORMATS)
def test_prompts_in_chunks(name, quantized, alone):
    engine, _ = quantized(
        name, scheduler__max_num_batched_tokens=5, kv_cache__enable_prefix_caching="false"
    )
    assert outputs(engine) == alone(name, quantized)


@pytest.mark.parametrize("name", FORMATS)
def test_cached_prefixes_and_copied_blocks(name, quantized, alone):
    engine, seen = quantized(name)
    assert outputs(engine) == alone(name, quantized)
    assert outputs(engine) == alone(name, quantized)
    assert seen.cached > 0
    assert seen.copied > 0


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.parametrize("name", FORMATS)
def test_preempted_requests(name, mode, quantized, alone):
    engine, seen = quantized(name, kv_cache__num_blocks=20, scheduler__preemption_mode=mode)
    assert outputs(engine) == alone(name, quantized)
    assert seen.preempted > 0
    assert (seen.swapped > 0) == (mode == "swap")


def test_the_formats_are_not_all_one(quantized, alone):
    """Guards the tests above: what is stored does decide what is answered."""
    answers = [str(alone(name, quantized)) for name in FORMATS]
    assert len(set(answers)) > len(FORMATS) // 2


# Capacity.


def bytes_per_block(name, head_size, block_size):
    halved = name.startswith("int4")
    scale = 4 if name.endswith("token_head") else 0
    vector = (head_size // 2 if halved else head_size) + scale
    return 2 * LAYERS * HEADS * block_size * vector


@pytest.mark.parametrize("name", FORMATS)
def test_a_block_costs_what_the_format_says(name, quantized):
    engine, _ = quantized(name, kv_cache__block_size=16)
    assert engine.info.quantizer == name
    assert engine.info.bytes_per_block == bytes_per_block(name, HEAD_SIZE, 16)
    assert engine.runner.backend.read_blocks([0]).numel() == engine.info.bytes_per_block


def test_eight_bits_hold_twice_the_blocks_of_sixteen(build):
    common = {"model__dtype": "bfloat16", "attention__backend": "torch_paged"}
    memory = {"kv_cache__num_blocks": "null", "kv_cache__memory": "100KiB"}
    plain = build(**common, **memory).info
    coded = build(**common, **memory, kv_cache__quantizer="fp8_e4m3").info
    assert plain.bytes_per_block == 2 * coded.bytes_per_block
    assert coded.num_blocks == 100 * 1024 // coded.bytes_per_block
    assert coded.num_blocks // 2 == plain.num_blocks


# What is refused.


@pytest.fixture
def odd_heads(tmp_path):
    """The configuration of a model whose head size is 7."""
    sizes = {"n_embd": 42, "n_head": 6, "n_layer": 2, "n_positions": 64, "vocab_size": 96}
    config = {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}, loader: dummy, dtype: float32}}\n"
        "attention: {backend: torch_paged}\n"
        "kv_cache: {num_blocks: 8, quantizer: int4_token_head}\n"
        "runtime: {device: cpu}\n"
    )
    return path


def test_a_head_size_that_the_format_cannot_hold_is_named(odd_heads):
    with pytest.raises(PageloomError) as raised:
        Engine.from_config(odd_heads)
    assert str(raised.value) == (
        "kv_cache.quantizer int4_token_head: int4 needs an even head size, not 7"
    )


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"kv_cache__quantizer": "fp8_e4m"},
            r'kv_cache\.quantizer = "fp8_e4m": no plugin registers this name; expected one of '
            r".*fp8_e4m3, .*; did you mean fp8_e4m3\?",
        ),
        (
            {"kv_cache__quantizer": "fp8_e4m3", "kv_cache__options__scale": 1.0},
            r"kv_cache\.options\.scale = 1\.0: .*; expected one of k_scale, v_scale",
        ),
        (
            {"kv_cache__quantizer": "int8", "kv_cache__options__k_scale": 0.0},
            r"kv_cache\.options.*k_scale must be from 2\*\*-120 to 2\*\*120, not 0\.0",
        ),
        (
            {"kv_cache__quantizer": "int8", "kv_cache__options__v_scale": "wide"},
            r'kv_cache\.options\.v_scale = "wide": expected a number',
        ),
        (
            {"kv_cache__quantizer": "int8_token_head", "kv_cache__options__k_scale": 1.0},
            r"kv_cache\.options\.k_scale = 1\.0: .*int8_token_head.* no options",
        ),
    ],
)
def test_a_mistake_in_the_yaml_is_one_sentence_with_its_key(build, overrides, message):
    with pytest.raises(ConfigError, match=message) as raised:
        build(attention__backend="torch_paged", **overrides)
    assert "\n" not in str(raised.value)
