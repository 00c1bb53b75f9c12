"""The format does what every format must, and what this one is for."""

import pytest
import torch
from pageloom_example_kvformat.rotated import Rotated4, levels, rotated

from pageloom.testing import KVFormatSuite


class TestRotated4(KVFormatSuite):
    quantizer = "rotated4"
    largest_error = 0.1


def stored(x):
    coder = Rotated4(Rotated4.Config())
    return coder.decode(coder.encode(x, 0, "k"), 0, "k", torch.float32)


def relative_error(x, y):
    return float((x - y).square().mean() / x.square().mean())


def test_a_vector_of_128_takes_68_bytes():
    assert Rotated4(Rotated4.Config()).bytes_per_vector(128) == 68


@pytest.mark.parametrize("head_size", [0, 1, 80, 96])
def test_a_head_size_that_cannot_be_rotated_is_refused(head_size):
    with pytest.raises(ValueError, match=f"power of two, not {head_size}"):
        Rotated4(Rotated4.Config()).bytes_per_vector(head_size)


def test_the_levels_lose_as_little_as_is_known_to_be_possible():
    """Max, Quantizing for minimum distortion, 1960: a 0.0095th with 16 levels."""
    x = torch.linspace(-8, 8, 20_001, dtype=torch.float64)
    density = torch.exp(-x.square() / 2)
    nearest = (x[:, None] - levels(x.device)).abs().amin(-1)
    lost = float((nearest.square() * density).sum() / density.sum())
    assert lost == pytest.approx(0.0095, abs=5e-6)


def test_a_rotation_keeps_lengths_and_undoes_itself():
    x = torch.randn(10, 64, dtype=torch.float64)
    torch.testing.assert_close(rotated(x).square().sum(-1), x.square().sum(-1))
    torch.testing.assert_close(rotated(rotated(x)), x)


@pytest.mark.parametrize("factor", [1, 10, 100])
def test_a_large_element_does_not_drown_the_others(factor):
    """With steps from the least to the largest, the others would all become one value."""
    x = torch.randn(200, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= factor
    assert relative_error(x, stored(x)) < 0.012


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e38])
def test_vectors_of_any_length_are_stored_as_well(size):
    x = torch.randn(50, 128, generator=torch.Generator().manual_seed(0)).clamp(-3, 3)
    assert relative_error(x, stored(x * size) / size) < 0.012


def test_vectors_without_any_spread_are_stored_too():
    for x in (torch.ones(1, 128), -torch.ones(1, 128), torch.eye(128)):
        assert relative_error(x, stored(x)) < 0.02


def test_nan_is_not_hidden():
    x = torch.zeros(2, 64)
    x[0, 3] = torch.nan
    assert stored(x)[0].isnan().all()
    assert not stored(x)[1].any()
