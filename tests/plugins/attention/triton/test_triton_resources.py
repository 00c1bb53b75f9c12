"""Every kernel of `triton_paged` compiles for GPUs of three generations and two makers.

``benchmarks/triton_resources.py`` does it, and records what it found.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[4] / "benchmarks" / "triton_resources.py"


def load_script():
    spec = importlib.util.spec_from_file_location("triton_resources", SCRIPT)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


resources = load_script()


@pytest.mark.parametrize("target", resources.TARGETS)
@pytest.mark.parametrize("variant", resources.VARIANTS, ids=str)
def test_a_kernel_fits_and_spills_no_registers(variant, target):
    found = resources.measure(variant, target)
    assert found.registers > 0
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= resources.SHARED_LIMIT[target]


def test_the_committed_table_has_every_kernel():
    table = json.loads(resources.RESULTS.read_text())["kernels"]
    assert list(table) == [str(variant) for variant in resources.VARIANTS]
    for row in table.values():
        assert list(row) == list(resources.TARGETS)
        assert all(found["spilled_bytes"] == 0 for found in row.values())
