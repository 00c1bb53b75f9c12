"""Greedy output in float32 depends on the prompt alone, whatever else runs and however."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pageloom import SamplingParams
from pageloom.config import load_config
from pageloom.engine.assemble import assemble
from pageloom.plugins import Plugins

MAX_MODEL_LEN = 64
VOCAB = 96
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "eos_token_id": 0,
}


@pytest.fixture(scope="module")
def build(tmp_path_factory):
    """Engines on one random model, by overrides."""
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(MODEL))
    path = folder / "engine.yaml"
    path.write_text(
        f"model: {{path: {folder}, loader: dummy, dtype: float32,"
        " options: {initializer_range: 0.5}}\n"
        "runtime: {device: cpu, num_threads: 1, debug: true}\n"
    )
    plugins = Plugins.load()

    def build(**overrides):
        given = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
        return assemble(load_config(path, given, plugins), plugins)

    return build


@pytest.fixture(scope="module")
def alone(build):
    """The output of a prompt that runs with nothing beside it, whole, in one block."""
    engine = build(attention__backend="torch_paged", kv_cache__num_blocks=64)
    known = {}

    def alone(prompt, length):
        key = (tuple(prompt), length)
        if key not in known:
            params = SamplingParams(temperature=0, max_tokens=length)
            known[key] = engine.generate(prompt, params)[0].outputs[0].token_ids
        return known[key]

    return alone


prompts = st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=40)
requests = st.lists(
    st.tuples(prompts, st.integers(1, 20), st.integers(0, 12)), min_size=1, max_size=8
)


def run_workload(engine, workload):
    """Each request arrives at its step; returns the token ids of all."""
    opened = {}
    step = 0
    while len(opened) < len(workload) or engine.has_requests:
        for number, (prompt, length, arrival) in enumerate(workload):
            if arrival <= step and number not in opened:
                params = SamplingParams(temperature=0, max_tokens=length)
                opened[number] = engine.open_request(prompt, params)
        if engine.has_requests:
            engine.step()
        step += 1
    return [opened[n].collect().outputs[0].token_ids for n in range(len(workload))]


@settings(max_examples=80)
@given(
    workload=requests,
    block_size=st.sampled_from([1, 3, 4, 16]),
    spare=st.integers(0, 12),
    budget=st.integers(1, 48),
    seats=st.integers(1, 6),
    chunked=st.booleans(),
    backend=st.sampled_from(["torch_paged", "cpu_paged"]),
)
def test_with_blocks(build, alone, workload, block_size, spare, budget, seats, chunked, backend):
    longest = max(min(len(prompt) + length, MAX_MODEL_LEN) for prompt, length, _ in workload)
    engine = build(
        attention__backend=backend,
        kv_cache__block_size=block_size,
        kv_cache__num_blocks=-(-longest // block_size) + spare,
        scheduler__max_num_batched_tokens=budget if chunked else MAX_MODEL_LEN,
        scheduler__max_num_seqs=seats,
        scheduler__enable_chunked_prefill=str(chunked).lower(),
    )
    outputs = run_workload(engine, workload)
    assert outputs == [alone(prompt, length) for prompt, length, _ in workload]


@settings(max_examples=25)
@given(
    workload=requests,
    slabs=st.integers(1, 4),
    budget=st.integers(1, 48),
    seats=st.integers(1, 6),
)
def test_with_naive_contiguous(build, alone, workload, slabs, budget, seats):
    engine = build(
        attention__backend="naive_contiguous",
        kv_cache__num_blocks=slabs,
        scheduler__max_num_batched_tokens=budget,
        scheduler__max_num_seqs=seats,
    )
    outputs = run_workload(engine, workload)
    assert outputs == [alone(prompt, length) for prompt, length, _ in workload]


def test_the_workloads_do_preempt(build):
    """Guards the tests above: small pools must really make requests give way."""
    engine = build(
        attention__backend="torch_paged", kv_cache__block_size=4, kv_cache__num_blocks=12
    )
    workload = [([n + 1] * 10, 20, 0) for n in range(4)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    opened = [engine.open_request(prompt, params) for prompt, _, _ in workload]
    while engine.has_requests:
        engine.step()
    assert sum(request.request.num_preemptions for request in opened) > 0
    large = build(attention__backend="torch_paged", kv_cache__num_blocks=64)
    for request, (prompt, _, _) in zip(opened, workload, strict=True):
        (output,) = large.generate(prompt, params)
        assert request.collect().outputs[0].token_ids == output.outputs[0].token_ids
