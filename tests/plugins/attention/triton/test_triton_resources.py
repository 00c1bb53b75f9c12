"""Every kernel of `triton_paged` compiles for GPUs of three generations and two makers.

``benchmarks/triton_resources.py`` does it, and records what it found.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from triton_script import load_script

pytest.importorskip("triton")


resources = load_script()


# Of the many for coded K and V, a few: the others are in the committed table.
COMPILED = [variant for variant in resources.VARIANTS if variant.layout is None] + [
    variant
    for variant in resources.VARIANTS
    if variant.dtype is torch.bfloat16
    and variant.layer.head_size == 128
    and (variant.kernel, variant.decode, str(variant).rpartition(", ")[2])
    in {
        ("attend", True, "fp8_e4m3 static"),
        ("attend", False, "int4 token_head"),
        ("store", False, "fp8_e4m3 token_head"),
        ("store", False, "int4 token_head"),
    }
]


@pytest.mark.parametrize("target", resources.TARGETS)
@pytest.mark.parametrize("variant", COMPILED, ids=str)
def test_a_kernel_fits_and_spills_no_registers(variant, target):
    found = resources.measure(variant, target)
    assert found.registers > 0
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= resources.SHARED_LIMIT[target]


def test_what_was_compiled_before_changes_no_variant():
    plain = resources.Variant("store", torch.bfloat16, resources.VARIANTS[0].layer)
    parameters = [
        resources._compile(variant, *resources.TARGETS["sm_80"]).asm["ptx"].count(".param ")
        for variant in (plain, replace(plain, rotary=True))
    ]
    assert parameters[0] < parameters[1]  # q, cos and sin


def test_the_committed_table_has_every_kernel():
    table = json.loads(resources.RESULTS.read_text())["kernels"]
    assert list(table) == [str(variant) for variant in resources.VARIANTS]
    for row in table.values():
        assert list(row) == list(resources.TARGETS)
        assert all(found["spilled_bytes"] == 0 for found in row.values())
