"""A model so small that an engine on it, with random weights, is made in an instant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAX_MODEL_LEN = 64
VOCAB = 96
CONFIG = {
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


def write_model(folder: Path, **changes: Any) -> None:
    """Make ``folder`` one that the loader ``dummy`` reads."""
    (folder / "config.json").write_text(json.dumps(CONFIG | changes))


def write_engine(folder: Path, more: str = "") -> Path:
    """Make ``folder`` such a model and an engine's configuration, ``more`` sections included."""
    write_model(folder)
    path = folder / "engine.yaml"
    path.write_text(
        f"model: {{path: {folder}, loader: dummy, dtype: float32,"
        " options: {initializer_range: 0.5}}\n"
        "runtime: {device: cpu, num_threads: 1, debug: true}\n" + more
    )
    return path
