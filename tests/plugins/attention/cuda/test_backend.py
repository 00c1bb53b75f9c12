"""What `cuda_paged` does on the host."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from emulation import EmulatedCUDAPaged, EmulatedKernels

from pageloom.contract import AttentionBatch, AttentionSpec, LayerSpec, VectorLayout, native
from pageloom.plugins import Plugins
from pageloom.testing.attention_cases import Case
from pageloom.testing.attention_rig import Branch, Candidate, Rig
from pageloom_attention.cuda_paged.backend import CUDAPaged, prefill_work
from pageloom_attention.cuda_paged.instance import ELEMENTS, SCALINGS

LAYER = LayerSpec(4, 2, 64, scale=0.125)
SPEC = AttentionSpec(torch.device("cuda"), torch.bfloat16, (LAYER,), 16, 1024)
PLUGINS = Plugins.load()
LAYOUTS = [VectorLayout(element, scaling) for element in ELEMENTS for scaling in SCALINGS]
NO_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
EMULATED = pytest.mark.skipif(native.find_compiler() is None, reason="there is no C++ compiler")


def rig(case: Case, kind: type[Rig] = Rig, **options) -> Rig:
    quantizers = {case.quantizer: partial(PLUGINS.get, "kv_quantizer", case.quantizer)}
    candidate = Candidate("emulated", EmulatedCUDAPaged, torch.device("cpu"), quantizers=quantizers)
    return kind(candidate, case, **options)


@NO_GPU
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_without_a_gpu_it_is_refused(device):
    assert "needs an NVIDIA GPU" in CUDAPaged.check(replace(SPEC, device=torch.device(device)))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": torch.float64}, "computes in float32, bfloat16 and float16, not torch.float64"),
        ({"quantizer": "mine"}, "for KV formats with a VectorLayout, and mine has none: torch_pag"),
        ({"layers": (LAYER, replace(LAYER, head_size=40))}, "multiples of 16 up to 256, not 40"),
        ({"layers": (replace(LAYER, head_size=512),)}, "multiples of 16 up to 256, not 512"),
    ],
)
def test_what_it_has_no_kernels_for_is_refused(change, reason):
    assert reason in CUDAPaged.check_shapes(replace(SPEC, **change))
    assert CUDAPaged.check_shapes(SPEC) is None


def test_nothing_of_cuda_is_imported_before_it_is_needed():
    script = (
        "import sys, torch\n"
        "before = set(sys.modules)\n"  # torch may have imported it by itself
        "from pageloom.contract import AttentionSpec, LayerSpec\n"
        "from pageloom_attention.cuda_paged.backend import CUDAPaged\n"
        "layer = LayerSpec(4, 2, 64, scale=0.125)\n"
        "CUDAPaged.check(AttentionSpec(torch.device('cpu'), torch.float32, (layer,), 16, 64))\n"
        "print([m for m in set(sys.modules) - before if m.partition('.')[0] == 'cuda'])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("counts", "group", "rows", "expected"),
    [
        ([1, 1, 40], 4, 64, [(2, 128), (2, 64), (2, 0)]),
        ([16, 17], 4, 64, [(1, 64), (1, 0), (0, 0)]),
        ([2, 3], 2, 2, [(1, 4), (1, 2), (1, 0), (0, 2), (0, 0)]),
        ([1, 2], 9, 64, [(1, 0)]),
    ],
)
def test_prefills_are_cut_into_tiles(counts, group, rows, expected):
    starts = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0).int()
    decodes = counts.count(1)
    lengths = torch.tensor(counts, dtype=torch.int32)
    batch = AttentionBatch(
        starts, lengths, lengths, lengths, starts, lengths, decodes, max(counts), max(counts)
    )
    work = prefill_work(batch, group, rows)
    assert (work.dtype, work.is_contiguous()) == (torch.int32, True)
    assert [tuple(row) for row in work.tolist()] == expected


class Watched(EmulatedKernels):
    def __init__(self, instance):
        super().__init__(instance)
        self.launches = []

    def launch(self, part, grid, threads, params):
        self.launches.append((part, grid))
        super().launch(part, grid, threads, params)


@pytest.fixture
def watched(monkeypatch):
    monkeypatch.setattr(EmulatedCUDAPaged, "load", lambda self, instance: Watched(instance))


@EMULATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_contexts_are_split_while_sequences_are_few(watched, dtype):
    one = rig(Case((LAYER,), dtype, 16, max_model_len=500), tokens=2000)
    kernels = one.backend.kernels[0]
    long, short, *others = [Branch() for _ in range(10)]
    one.step((long, 400), (short, 3), *((other, 2) for other in others))
    kernels.launches.clear()
    one.step((short, 1))
    alone = list(kernels.launches)
    # The 16 thread blocks that this GPU has room for are 2 KV heads and 8 parts of a context.
    assert alone == [("store", alone[0][1]), ("decode", (1, 2, 8)), ("merge", (1, 4, 1))]
    one.step((long, 1))
    assert kernels.launches == 2 * alone, "a captured graph must do for any context"
    kernels.launches.clear()
    one.step(*((branch, 1) for branch in (long, short, *others)))
    assert [launch for launch in kernels.launches if launch[0] != "store"] == [
        ("decode", (10, 2, 1))
    ]


@EMULATED
def test_a_window_is_not_split_into_more_parts_than_it_is_worth(watched):
    one = rig(Case((replace(LAYER, window=90),), torch.bfloat16, 16, max_model_len=500))
    branch = Branch()
    one.step((branch, 300))
    one.step((branch, 1))
    assert ("decode", (1, 2, 2)) in one.backend.kernels[0].launches


@EMULATED
def test_layers_of_one_shape_share_their_kernels(watched):
    capped, other = replace(LAYER, softcap=3.0), LayerSpec(2, 2, 64, scale=0.125)
    kernels = rig(Case((LAYER, capped, other), torch.bfloat16, 16)).backend.kernels
    assert kernels[0] is kernels[1]
    assert kernels[0] is not kernels[2]


@EMULATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_group_may_have_more_heads_than_a_matrix_has_rows(dtype):
    one = rig(Case((LayerSpec(19, 1, 32, scale=0.2, sinks=True),), dtype, 16, max_model_len=256))
    first, second = Branch(), Branch()
    one.step((first, 100), (second, 30))
    one.step((first, 1), (second, 9))
    one.step((first, 1), (second, 1))


class MisalignedRig(Rig):
    """No tensor begins at a multiple of 16 bytes."""

    def attend(self, index, q, k, v):
        q, k, v, out = (self.moved(x) for x in (q, k, v, torch.full_like(q, torch.nan)))
        self.backend.forward(index, q, k, v, out)
        return out.clone()

    @staticmethod
    def moved(x):
        flat = torch.empty(x.numel() + 1, dtype=x.dtype)[1:]
        return flat.view(x.shape).copy_(x)


@EMULATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_may_begin_anywhere(dtype):
    one = rig(Case((LAYER,), dtype, 16), MisalignedRig)
    first, second = Branch(), Branch()
    one.step((first, 20), (second, 1))
    one.step((first, 1), (second, 5))


@EMULATED
@pytest.mark.parametrize("layout", [None, *LAYOUTS], ids=str)
def test_bytes_per_block_is_what_the_cache_takes(layout, monkeypatch):
    monkeypatch.setattr(EmulatedCUDAPaged, "load", lambda self, instance: None)
    layers = (LAYER, replace(LAYER, head_size=80, num_kv_heads=1))
    spec = replace(SPEC, device=torch.device("cpu"), layers=layers, block_size=3, layout=layout)
    one = EmulatedCUDAPaged(None, spec, None)
    one.allocate(5)
    held = [x for x in (*one.cache, *one.scales) if x is not None]
    assert sum(x.numel() * x.itemsize for x in held) == 5 * one.bytes_per_block()
    width = layout.bytes_per_vector if layout else lambda head_size: 2 * head_size
    assert one.bytes_per_block() == 3 * (4 * width(64) + 2 * width(80))


@EMULATED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_of_codes_need_not_be_aligned_to_a_load(dtype):
    """72 bytes each, and a half-full load at their end."""
    case = Case((LayerSpec(2, 1, 144, scale=0.1),), dtype, 16, quantizer="int4_token_head")
    one = rig(case)
    first, second = Branch(), Branch()
    one.step((first, 20), (second, 1))
    one.step((first, 1), (second, 5))
