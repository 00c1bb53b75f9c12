"""The KV formats as the CUDA kernels write and read them, number by number."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from emulation import EmulatedCUDAPaged, EmulatedKernels, built

from pageloom.contract import AttentionBatch, AttentionSpec, LayerSpec, VectorLayout, native
from pageloom.plugins import Plugins
from pageloom_attention.cuda_paged.instance import ELEMENTS, SCALINGS, TYPES, Instance

pytestmark = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler")

PLUGINS = Plugins.load()
FORMATS = PLUGINS.names("kv_quantizer")
LAYOUTS = [VectorLayout(element, scaling) for element in ELEMENTS for scaling in SCALINGS]
SIZE, BLOCK = 80, 16  # a head size of which 16 elements are left over by wide loads


def prefix(instance: Instance) -> str:
    layout = instance.layout
    return f"{TYPES[instance.dtype]}_{layout.element}_{layout.scaling}_"


@cache
def library():
    """The kernels of all dtypes and formats that decodes need, compiled at once."""
    instances = [Instance(dtype, SIZE, 1, BLOCK, layout) for dtype in TYPES for layout in LAYOUTS]
    return built(
        tuple(
            (prefix(instance) + part, instance.kernels[part])
            for instance in instances
            for part in ("store", "decode", "merge")
        )
    )


class Kernels(EmulatedKernels):
    def __init__(self, instance):
        self.library, self.prefix = library(), prefix(instance)

    def launch(self, part, grid, threads, params):
        super().launch(self.prefix + part, grid, threads, params)


class Backend(EmulatedCUDAPaged):
    def load(self, instance):
        return Kernels(instance)


@pytest.fixture(params=FORMATS)
def quantizer(request):
    made = PLUGINS.get("kv_quantizer", request.param)
    static = made.layout.scaling == "static"
    return made(made.Config(k_scale=0.37, v_scale=1.7) if static else made.Config())


def vectors(dtype: torch.dtype) -> torch.Tensor:
    """What may go wrong, and what should not: ``[tokens, 1, SIZE]``."""
    generator = torch.Generator().manual_seed(0)
    most, some = torch.finfo(dtype).max, torch.randn(12, SIZE, generator=generator)
    ramp = torch.arange(SIZE) - SIZE / 2
    rows = [
        *some[:4],
        some[4] * 1e4,
        some[5] * 1e-3,
        some[6] * torch.finfo(dtype).tiny,
        some[7].abs(),
        -some[8].abs() - 3,
        ramp / 2,  # ties
        ramp * 1.7 / 2,
        2.0 ** (ramp / 2),
        torch.zeros(SIZE),
        -torch.zeros(SIZE),
        torch.full((SIZE,), 3.3),
        some[9].sign() * most,
        torch.where(some[10] > 1, torch.inf, some[10]),
        torch.where(some[11] < -1, -torch.inf, some[11]),
        torch.where(ramp == 7, torch.nan, some[0]),
        torch.full((SIZE,), torch.nan),
    ]
    return torch.stack(rows).to(dtype).unsqueeze(1)


def decodes(quantizer, k, v):
    """A backend, and its output for sequences of one token each."""
    layer, count = LayerSpec(1, 1, SIZE, scale=0.1), len(k)
    spec = AttentionSpec(torch.device("cpu"), k.dtype, (layer,), BLOCK, 64, "", quantizer.layout)
    backend = Backend(None, spec, quantizer)
    backend.allocate(count)
    ones, blocks = torch.ones(count, dtype=torch.int32), torch.arange(count, dtype=torch.int32)
    starts = torch.arange(count + 1, dtype=torch.int32)
    batch = AttentionBatch(
        starts, ones, blocks[:, None], blocks.long() * BLOCK, starts, ones, count, 1, 1
    )
    backend.plan(batch)
    out = torch.empty_like(k)
    backend.forward(0, torch.ones_like(k), k, v, out)
    return backend, out


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_stored_bytes_are_those_of_the_format(quantizer, dtype):
    x = vectors(dtype)
    backend, _ = decodes(quantizer, x, x.flip(-1))
    parts = [backend.cache[0]]
    if (scales := backend.scales[0]) is not None:
        parts.append(scales.view(torch.uint8).view(*scales.shape, 4))
    stored = torch.cat(parts, dim=-1)[:, :, :, 0]  # the first slot of each block
    for i, (kind, given) in enumerate((("k", x), ("v", x.flip(-1)))):
        expected = quantizer.encode(given, 0, kind)
        actual = stored[:, i]
        regular = ~given.isnan().any(-1).squeeze(1)
        torch.testing.assert_close(actual[regular], expected[regular], rtol=0, atol=0)
        # There is more than one code for NaN.
        actual, expected = (quantizer.decode(y, 0, kind, dtype) for y in (actual, expected))
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_read_is_what_the_format_says(quantizer, dtype):
    """The output of attention to one token is its value."""
    codes = torch.arange(4 * SIZE, dtype=torch.uint8).view(4, 1, SIZE)
    if quantizer.layout.scaling == "static":
        width = quantizer.bytes_per_vector(SIZE)
        every = quantizer.decode(codes[..., :width], 0, "v", dtype)
    else:
        every = codes.view(torch.float8_e4m3fn).to(dtype)
    v = torch.cat([vectors(dtype), every])
    k = torch.ones_like(v)
    _, out = decodes(quantizer, k, v)
    expected = quantizer.decode(quantizer.encode(v, 0, "v"), 0, "v", dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
