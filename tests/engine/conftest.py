"""Engines: one on the demo model, shared since loading it takes seconds, and many on a tiny one.

The former is in float32: in bfloat16 a near tie falls one way or the other with the shape of the
batch.
"""

from __future__ import annotations

import pytest

from pageloom import Engine
from pageloom.config import load_config
from pageloom.engine.assemble import assemble
from pageloom.plugins import Plugins
from tiny_model import write_engine


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
    path = write_engine(folder)
    plugins = Plugins.load()

    def build(**overrides):
        given = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
        return assemble(load_config(path, given, plugins))

    return build
