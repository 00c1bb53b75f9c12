"""The fused operations against what the model code of `transformers` computes."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from pageloom.ops.activation import silu_and_mul
from pageloom.ops.linear import Linear, packs
from pageloom.ops.norm import add_rms_norm, rms_norm
from pageloom.ops.rope import RotaryTable, rotate_

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: {"atol": 2e-6, "rtol": 1e-5}, torch.bfloat16: {"atol": 0, "rtol": 1e-2}}
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def reference_norm(weight, eps):
    norm = LlamaRMSNorm(len(weight), eps)
    norm.weight.data = weight
    return norm


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-4, 1.0, 300.0])
def test_rms_norm_rounds_as_the_llama_family_does(dtype, scale):
    x, weight = (torch.randn(5, 576) * scale).to(dtype), torch.rand(576).to(dtype)
    before = x.clone()
    with torch.inference_mode():
        expected = reference_norm(weight, 1e-5)(x)
        torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, **TOLERANCE[dtype])
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_takes_a_weight_per_head_and_strided_rows(dtype):
    rows = torch.randn(5, 6, 64).to(dtype)
    x, weight = rows[:, :4], torch.rand(4, 64).to(dtype)
    for head in range(4):
        expected = reference_norm(weight[head], 1e-6)(x[:, head])
        torch.testing.assert_close(rms_norm(x, weight, 1e-6)[:, head], expected, **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_keeps_the_sum_in_the_residual(dtype):
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    weight = torch.rand(64).to(dtype)
    total = x + residual
    normed = add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul_leaves_its_input_alone(dtype):
    gate_up = torch.randn(5, 2 * 96).to(dtype)
    before = gate_up.clone()
    found = silu_and_mul(gate_up)
    assert torch.equal(gate_up, before)
    assert found.is_contiguous()
    torch.testing.assert_close(found, F.silu(gate_up[:, :96]) * gate_up[:, 96:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 1.3])
def test_rotation_equals_that_of_transformers_at_any_positions(dtype, scale):
    inv_freq = 1.0 / 10000.0 ** (torch.arange(0, 64, 2) / 64)
    table = RotaryTable(inv_freq, scale, 5000, dtype, CPU)
    positions = torch.tensor([0, 4999, 17, 17, 1024])
    merged = torch.randn(5, 8, 64).to(dtype)  # 4 q, 2 k, 2 v heads
    angles = positions[:, None].float() * torch.cat((inv_freq, inv_freq))
    cos, sin = (angles.cos() * scale).to(dtype), (angles.sin() * scale).to(dtype)
    q, k = apply_rotary_pos_emb(merged[:, :4], merged[:, 4:6], cos, sin)
    v = merged[:, 6:].clone()

    rotate_(merged[:, :6], *table.at(positions))
    tolerance = {"atol": 3e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(merged[:, :6], torch.cat((q, k), 1), **tolerance)
    assert torch.equal(merged[:, 6:], v)


@pytest.mark.parametrize("rows", [1, 3, 33, 200])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_finished_linear_computes_what_it_did_before(dtype, with_bias, rows):
    weight = (torch.randn(70, 48) / 7).to(dtype)
    bias = torch.randn(70).to(dtype) if with_bias else None
    x = torch.randn(rows, 48).to(dtype)
    layer = Linear(weight, bias)
    expected = F.linear(x, weight, bias)
    assert torch.equal(layer(x), expected)
    layer.finish()
    tolerance = {"atol": 2e-2, "rtol": 2e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(layer(x), expected, **tolerance)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="this CPU has no bfloat16 kernels"
)
def test_packing_releases_the_plain_weight():
    layer = Linear(torch.randn(70, 48).bfloat16(), None)
    assert packs(layer.weight)
    layer.finish()
    assert layer.weight.numel() == 0


def test_float32_weights_stay_as_they_are():
    weight = torch.randn(70, 48)
    layer = Linear(weight, None)
    layer.finish()
    assert layer.weight is weight
