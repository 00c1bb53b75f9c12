"""The formats of the KV cache are what `VectorLayout` says, bit by bit."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from kv_reference import LIMIT, MINIFLOATS, Reference

from pageloom.plugins import Plugins

ELEMENTS = ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
STATIC = ELEMENTS
TOKEN_HEAD = tuple(f"{element}_token_head" for element in ELEMENTS)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
SCALES = (1.0, 0.03, 7.5, 2.0**-120, 2.0**120)

plugins = Plugins.load()


def make(name, **options):
    quantizer = plugins.get("kv_quantizer", name)
    return quantizer(quantizer.Config(**options))


def reference(name, scale=1.0):
    layout = plugins.get("kv_quantizer", name).layout
    return Reference(layout.element, layout.scaling, scale)


def lying_in_memory(x, how):
    """The same numbers, ``[n, head_size]``, with other strides."""
    if how == "every other element":
        return torch.stack([x, torch.full_like(x, 77)], -1)[..., 0]
    if how == "heads last":
        return x.T.contiguous().T
    if how == "between others":
        return torch.cat([x, x, x], -1)[:, x.shape[-1] : 2 * x.shape[-1]]
    return x


@st.composite
def vectors(draw):
    """Of any dtype and strides: any float at all, or what a model would store."""
    size = draw(st.sampled_from([2, 6, 16, 34, 64]))
    shape = (draw(st.integers(1, 4)), size)
    if draw(st.booleans()):
        x = torch.from_numpy(draw(arrays(np.float32, shape, elements=st.floats(width=32))))
    else:
        generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 30)))
        x = torch.randn(shape, generator=generator) * 10.0 ** draw(st.integers(-6, 5))
    x = x.to(draw(st.sampled_from(DTYPES)))
    hows = ["as it comes", "every other element", "heads last", "between others"]
    return lying_in_memory(x, draw(st.sampled_from(hows)))


def as_numpy(x):
    return x.double().numpy()


def dtype_name(x):
    return str(x.dtype).removeprefix("torch.")


def canonical(data, name):
    """The bytes, less what the layout leaves open: which NaN, and the sign of a least element 0."""
    data = data.copy()
    codes = data[:, :-4] if name in TOKEN_HEAD else data
    if name.startswith("fp8"):
        codes[(codes & 127) >= len(MINIFLOATS[name.removesuffix("_token_head")])] = 127
    if name == "int4_token_head":
        least = np.ascontiguousarray(data[:, -2:]).view(np.float16)
        data[:, -2:] = np.where(least == 0, np.float16(0), least).view(np.uint8)
    return data


@settings(max_examples=60)
@pytest.mark.parametrize("name", [*STATIC, *TOKEN_HEAD])
@given(x=vectors(), scale=st.sampled_from(SCALES))
def test_bytes_are_those_of_the_layout(name, x, scale):
    quantizer = make(name, **({"k_scale": scale} if name in STATIC else {}))
    before = x.clone()
    data = quantizer.encode(x, 0, "k")
    assert torch.equal(x.nan_to_num(), before.nan_to_num())
    assert data.dtype == torch.uint8
    assert data.shape == (len(x), quantizer.bytes_per_vector(x.shape[-1]))
    expected = reference(name, scale).encode(as_numpy(x), dtype_name(x))
    numbers = np.ones(len(x), bool)
    if name in TOKEN_HEAD:  # of a vector that is NaN, the scale says so and the codes say nothing
        numbers = ~np.isnan(as_numpy(x)).any(-1)
        assert quantizer.decode(data, 0, "k", torch.float32)[~numbers].isnan().all()
    actual, expected = (canonical(d[numbers], name) for d in (data.numpy(), expected))
    np.testing.assert_array_equal(actual, expected)


@settings(max_examples=30)
@pytest.mark.parametrize("name", [*STATIC, *TOKEN_HEAD])
@given(x=vectors(), scale=st.sampled_from(SCALES), dtype=st.sampled_from(DTYPES))
def test_bytes_are_read_as_the_layout_says(name, x, scale, dtype):
    quantizer = make(name, **({"v_scale": scale} if name in STATIC else {}))
    data = quantizer.encode(x, 0, "v")
    before = data.clone()
    actual = quantizer.decode(data, 0, "v", dtype)
    assert torch.equal(data, before)
    assert actual.dtype == dtype
    expected = torch.from_numpy(reference(name, scale).decode(data.numpy())).to(dtype)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("name", STATIC)
def test_every_code_is_read_as_the_layout_says(name):
    data = torch.arange(256, dtype=torch.uint8).view(-1, 1)
    expected = torch.from_numpy(reference(name, 0.5).decode(data.numpy()))
    actual = make(name, k_scale=0.5).decode(data, 0, "k", torch.float32)
    # The IEEE codes of infinity are never stored.
    stored = ~actual.isinf()
    assert stored.sum() == (254 if name == "fp8_e5m2" else stored.numel())
    torch.testing.assert_close(actual[stored], expected[stored], rtol=0, atol=0, equal_nan=True)


@settings(max_examples=30)
@pytest.mark.parametrize("name", [*STATIC, *TOKEN_HEAD])
@given(x=vectors())
def test_infinities_saturate_and_nan_stays_nan(name, x):
    quantizer = make(name)
    decoded = quantizer.decode(quantizer.encode(x, 0, "k"), 0, "k", x.dtype)
    lost = x.isnan()
    if name in TOKEN_HEAD:
        lost = lost.any(-1, keepdim=True).expand_as(x)
    assert torch.equal(decoded.isnan(), lost)
    assert not decoded.isinf().any()


@settings(max_examples=30)
@pytest.mark.parametrize("name", [*STATIC, *TOKEN_HEAD])
@given(x=vectors())
def test_a_batch_is_coded_like_its_vectors(name, x):
    x = x.nan_to_num(nan=0.5)  # any NaN stands for any other
    quantizer = make(name)
    data = quantizer.encode(x, 0, "k")
    rows = [quantizer.encode(x[i : i + 1], 0, "k")[0] for i in range(len(x))]
    assert torch.equal(data, torch.stack(rows))
    nested = quantizer.encode(x.expand(2, 3, *x.shape), 0, "k")
    assert torch.equal(nested, data.expand_as(nested))
    decoded = quantizer.decode(data, 0, "k", torch.float32)
    again = quantizer.decode(nested, 0, "k", torch.float32)
    assert torch.equal(again, decoded.expand_as(again))


def largest_error(name, x, scale):
    """How far at most ``x`` (float64 ``[n, head_size]``, finite) may be from what is stored."""
    element = name.removesuffix("_token_head")
    if name == "int4_token_head":
        least, most = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
        step = np.maximum((most - least) / 15, 2.0**-24)
        # Scale and least element are rounded to float16.
        return step / 2 + 16 * (step * 2.0**-11 + 2.0**-25) + 2 * np.abs(least) * 2.0**-11
    if name in TOKEN_HEAD:
        scale = np.maximum(np.abs(x).max(-1, keepdims=True), 2.0**-100) / LIMIT[element]
    mantissa = {"fp8_e4m3": 3, "fp8_e5m2": 2}.get(element)
    if mantissa is None:
        return np.full_like(x, 0.5) * scale
    subnormal = MINIFLOATS[element][1]
    return np.maximum(np.abs(x) * 2.0 ** -(mantissa + 1), subnormal / 2 * scale)


@settings(max_examples=40)
@pytest.mark.parametrize("name", [*STATIC, *TOKEN_HEAD])
@given(seed=st.integers(0, 1 << 30), power=st.integers(-3, 3), shift=st.floats(-3, 3))
def test_the_error_is_half_a_step_at_most(name, seed, power, shift):
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn(7, 64, generator=generator) + shift) * 10.0**power
    scale = float(x.abs().max()) / LIMIT[name.removesuffix("_token_head")]
    quantizer = make(name, **({"k_scale": scale} if name in STATIC else {}))
    decoded = quantizer.decode(quantizer.encode(x, 0, "k"), 0, "k", torch.float32)
    error = np.abs(as_numpy(decoded) - as_numpy(x))
    assert (error <= largest_error(name, as_numpy(x), scale) * (1 + 1e-4)).all()


@pytest.mark.parametrize("name", [*STATIC, *TOKEN_HEAD])
def test_zero_is_stored_exactly(name):
    quantizer = make(name)
    for dtype in DTYPES:
        data = quantizer.encode(torch.zeros(3, 64, dtype=dtype), 0, "k")
        assert not quantizer.decode(data, 0, "k", dtype).any()


@pytest.mark.parametrize("name", [*STATIC, *TOKEN_HEAD])
def test_no_vectors_are_no_bytes(name):
    data = make(name).encode(torch.zeros(0, 2, 64), 0, "k")
    assert data.shape == (0, 2, make(name).bytes_per_vector(64))


@pytest.mark.parametrize(
    ("name", "bytes_of_64", "bytes_of_128"),
    [
        ("fp8_e4m3", 64, 128),
        ("fp8_e5m2", 64, 128),
        ("int8", 64, 128),
        ("int4", 32, 64),
        ("fp8_e4m3_token_head", 68, 132),
        ("fp8_e5m2_token_head", 68, 132),
        ("int8_token_head", 68, 132),
        ("int4_token_head", 36, 68),
    ],
)
def test_a_vector_takes_no_byte_more(name, bytes_of_64, bytes_of_128):
    assert make(name).bytes_per_vector(64) == bytes_of_64
    assert make(name).bytes_per_vector(128) == bytes_of_128


@pytest.mark.parametrize("name", ["int4", "int4_token_head"])
def test_half_a_byte_more_is_refused(name):
    with pytest.raises(ValueError, match="int4 needs an even head size, not 33"):
        make(name).bytes_per_vector(33)
