"""What the tests of the attention bench share."""

from __future__ import annotations

import json

import pytest
from attention_bench import TINY, bench

from pageloom.bench.attention import rates


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    file = tmp_path_factory.mktemp("matrix") / "tiny.yaml"
    file.write_text(json.dumps(TINY))
    return file


@pytest.fixture(scope="session")
def recorded(tiny, tmp_path_factory):
    """One run of the command: its result, and the folder that it wrote."""
    folder = tmp_path_factory.mktemp("run")
    return bench(tiny, "--json", folder / "run.json", "--output", folder), folder


@pytest.fixture
def small_rates(monkeypatch):
    """The machine's rates from buffers that take no time."""
    monkeypatch.setitem(rates.READ_BYTES, "cpu", 1 << 20)
    monkeypatch.setitem(rates.MATRIX_SIZE, "cpu", 32)
