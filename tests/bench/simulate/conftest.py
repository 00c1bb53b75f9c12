"""A profile that nobody measured, and configurations that it is for."""

from __future__ import annotations

from pathlib import Path

import pytest

from pageloom.contract import WorkerReport
from pageloom.contract.costs import StepCosts, StepProfile
from tiny_model import MAX_MODEL_LEN, VOCAB, write_engine

WORKER = WorkerReport(
    architecture="llama",
    device="cpu",
    dtype="float32",
    vocab_size=VOCAB,
    max_model_len=MAX_MODEL_LEN,
    backend="torch_paged",
    block_size=4,
    bytes_per_block=4096,
    num_blocks=64,
    host_blocks=0,
    weights={"float32": 1000},
    activations=None,
)
COSTS = StepCosts(
    constant=0.5,
    tokens=((1, 0.0), (8, 0.25), (64, 2.0)),
    sequence=0.03125,
    draw=0.015625,
    decode_context=2.0**-12,
    prefill_context=2.0**-11,
    prefill_pair=2.0**-14,
)


@pytest.fixture
def profile(tmp_path) -> Path:
    path = tmp_path / "profile.json"
    StepProfile(COSTS, WORKER, {"machine": "none"}).write(path)
    return path


@pytest.fixture
def config(tmp_path, profile) -> Path:
    """An engine's configuration that names the profile, of a model without weights."""
    return write_engine(
        tmp_path,
        "scheduler: {max_num_seqs: 8, max_num_batched_tokens: 32}\n"
        "kv_cache: {block_size: 4, num_blocks: 64, swap_space: null}\n"
        f"parallel: {{executor: simulated, options: {{profile: {profile}}}}}\n",
    )
