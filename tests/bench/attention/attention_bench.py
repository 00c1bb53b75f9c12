"""A matrix that takes seconds, the command, and single cases without either."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from pageloom.bench.attention.matrix import Case
from pageloom.bench.attention.workload import Workload

ROOT = Path(__file__).parents[3]
TINY = {
    "device": "cpu",
    "num_threads": 1,
    "rounds": 6,
    "min_time": 0.0005,
    "kv_memory": "1MiB",
    "backends": ["naive_contiguous", "torch_paged", "triton_paged"],
    "peers": ["sdpa"],
    "shapes": {"tiny": {"num_heads": 6, "num_kv_heads": 2, "head_size": 32, "layers": 2}},
    "cases": [
        {"phase": "decode", "batch": [3], "context": [40], "dtype": ["float32"]},
        {"phase": "mixed", "batch": [3], "context": [40], "query": 8, "block_size": [16]},
    ],
}
DECODE = "decode-batch3-context40-tiny-float32"
MIXED = "mixed-batch3-context40-query8-tiny-bfloat16-block16"


def environment(**variables):
    # Also not that this is a worker of pytest-xdist, where pytest-benchmark times nothing.
    kept = {
        name: value
        for name, value in os.environ.items()
        if name != "TRITON_INTERPRET" and not name.startswith("PYTEST_")
    }
    return {**kept, **{key: str(value) for key, value in variables.items()}}


def run(*command, **variables):
    return subprocess.run(
        [sys.executable, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=1200,
        cwd=ROOT,
        env=environment(**variables),
    )


def bench(*arguments, **variables):
    return run("-m", "pageloom", "bench", "attention", *arguments, **variables)


def make_case(phase="decode", batch=3, context=40, query=1, dtype="float32", **others):
    return Case(
        phase,
        batch,
        context,
        query,
        "tiny",
        **{"num_heads": 6, "num_kv_heads": 2, "head_size": 32, "layers": 2, **others},
        dtype=dtype,
    )


def make_workload(case=None, layers=2):
    return Workload(case or make_case(), torch.device("cpu"), layers, seed=0)
