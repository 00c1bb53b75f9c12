"""Engines: one on the demo model, shared since loading it takes seconds, and many on a tiny one.

The former is in float32: in bfloat16 a near tie falls one way or the other with the shape of the
batch.
"""

from __future__ import annotations

import json

import pytest

from pageloom import Engine
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


@pytest.fixture(scope="session")
def engine():
    return Engine.from_config(
        "configs/smollm2.yaml",
        ["model.dtype=float32", "kv_cache.memory=64MiB", "runtime.debug=true"],
    )


@pytest.fixture(scope="session")
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
