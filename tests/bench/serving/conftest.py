"""Configurations of one tiny random model, to be compared with each other."""

from __future__ import annotations

import json

import pytest

from tiny_model import write_model


@pytest.fixture(scope="session")
def config(tmp_path_factory):
    """Write a configuration with these overrides and return its path."""
    folder = tmp_path_factory.mktemp("bench")
    write_model(folder)
    (folder / "base.yaml").write_text(
        f"model: {{path: {folder}, loader: dummy, dtype: float32}}\n"
        "scheduler: {max_num_seqs: 16, max_num_batched_tokens: 64}\n"
        "attention: {backend: torch_paged}\n"
        "kv_cache: {block_size: 4, num_blocks: 64, swap_space: null}\n"
        "runtime: {device: cpu, num_threads: 1, debug: true}\n"
    )

    def config(name, **overrides):
        path = folder / f"{name}.yaml"
        path.write_text(json.dumps({"extends": "base.yaml", **overrides}))
        return str(path)

    return config


@pytest.fixture(scope="session")
def paged(config):
    return config("paged")


@pytest.fixture(scope="session")
def contiguous(config):
    """As much KV memory as ``paged``: four slabs of the longest sequence."""
    return config(
        "contiguous",
        attention={"backend": "naive_contiguous"},
        kv_cache={"block_size": None, "num_blocks": 4},
    )
