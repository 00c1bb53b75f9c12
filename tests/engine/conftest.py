"""One engine on the demo model, shared: loading it takes seconds."""

from __future__ import annotations

import pytest

from pageloom import Engine


@pytest.fixture(scope="session")
def engine():
    return Engine.from_config(
        "configs/smollm2.yaml", ["kv_cache.memory=64MiB", "runtime.debug=true"]
    )
