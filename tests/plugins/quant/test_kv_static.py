"""Constant scales: whence they come, and what is said of those that are missing or of no use."""

from __future__ import annotations

import logging

import pytest
import torch

from pageloom_quant.kv.static import FP8E4M3, Int8

LOGGER = "pageloom_quant.kv.static"


def fp8(**options):
    return FP8E4M3(FP8E4M3.Config(**options))


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_each_layer_and_kind_has_its_own_scale_of_the_checkpoint(caplog):
    quantizer = fp8()
    quantizer.set_scales(2, {(0, "k"): 2.0, (0, "v"): 0.5, (1, "k"): 4.0, (1, "v"): 0.25})
    assert warnings(caplog) == []
    x = torch.full((1, 16), 3.0)
    for (layer, kind), scale in {
        (0, "k"): 2.0,
        (0, "v"): 0.5,
        (1, "k"): 4.0,
        (1, "v"): 0.25,
    }.items():
        assert quantizer.static_scale(layer, kind) == scale
        data = quantizer.encode(x, layer, kind)
        assert torch.equal(data.view(torch.float8_e4m3fn).float(), x / scale)
        assert torch.equal(quantizer.decode(data, layer, kind, torch.float32), x)


def test_a_scale_in_the_yaml_comes_before_the_checkpoint(caplog):
    quantizer = fp8(k_scale=0.75)
    quantizer.set_scales(1, {(0, "k"): 2.0, (0, "v"): 0.5})
    assert quantizer.static_scale(0, "k") == 0.75
    assert quantizer.static_scale(0, "v") == 0.5
    assert warnings(caplog) == []


@pytest.mark.parametrize(
    ("options", "scales", "expected"),
    [
        ({}, {}, ["no k_scale and v_scale of any layer"]),
        ({"k_scale": 1.0}, {}, ["no v_scale of any layer"]),
        ({"k_scale": 1.0, "v_scale": 1.0}, {}, []),
        ({}, {(n, "v"): 1.0 for n in range(6)}, ["no k_scale of any layer"]),
        (
            {},
            {(n, kind): 1.0 for n in (3, 5) for kind in "kv"},
            ["no k_scale and v_scale of layers 0-2, 4"],
        ),
        (
            {},
            {(0, "k"): 1.0, (1, "v"): 1.0},
            ["no k_scale of layers 1-5", "no v_scale of layers 0, 2-5"],
        ),
    ],
)
def test_missing_scales_are_1_and_one_line_says_so(caplog, options, scales, expected):
    quantizer = fp8(**options)
    quantizer.set_scales(6, scales)
    found = warnings(caplog)
    assert len(found) == len(expected)
    for line, part in zip(found, expected, strict=True):
        assert part in line
        assert "1.0 is used" in line
        assert "kv_cache.options" in line
    assert quantizer.static_scale(4, "k") == 1.0


def test_scales_made_for_other_codes_are_used_and_doubted(caplog):
    quantizer = Int8(Int8.Config())
    quantizer.set_scales(1, {(0, "k"): 0.1, (0, "v"): 0.1})
    assert quantizer.static_scale(0, "k") == 0.1
    (line,) = warnings(caplog)
    assert "for int8 as they are" in line
    assert "3.53 times" in line


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf"), 1e-40, 1e38])
def test_a_scale_of_no_use_is_named(scale):
    with pytest.raises(ValueError, match=r"checkpoint's v_scale of layer 3 must be from 2\*\*-120"):
        fp8().set_scales(4, {(3, "v"): scale})
    with pytest.raises(ValueError, match=r"^k_scale must be from 2\*\*-120 to 2\*\*120, not"):
        FP8E4M3.Config(k_scale=scale)


def test_a_scale_of_a_layer_that_the_model_lacks_is_named():
    with pytest.raises(ValueError, match="k_scale of layer 7, but the model has 4 layers"):
        fp8().set_scales(4, {(7, "k"): 1.0})
