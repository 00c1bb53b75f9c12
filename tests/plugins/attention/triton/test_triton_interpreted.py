"""Runs ``interpreted.py``, in a process in which Triton is imported to interpret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

TESTS = Path(__file__).with_name("interpreted.py")
# Small arrays, for which more threads only wait for each other.
ENVIRONMENT = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


def test_the_kernels_conform_when_interpreted():
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-W", "ignore", str(TESTS)]
    done = subprocess.run(
        command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, timeout=1200
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    assert all("KV formats whose bytes follow a VectorLayout" in line for line in skipped), skipped
