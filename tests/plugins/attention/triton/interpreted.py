"""The kernels of `triton_paged` on a CPU. Triton must be imported with ``TRITON_INTERPRET=1``, so
``test_triton_interpreted.py`` runs this in a process of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from pageloom import Engine, SamplingParams
from pageloom.plugins import Plugins
from pageloom.testing import AttentionSuite
from pageloom.testing.attention_cases import CASES, KINDS, PLAIN, Case, layer
from pageloom.testing.attention_oracle import attention, excess
from pageloom.testing.attention_rig import Rig
from pageloom.testing.attention_shadow import Branch
from pageloom_attention.triton_paged import backend, work
from pageloom_attention.triton_paged.tiles import Chip, Tiles
from tiny_model import write_model
from triton_interpreter import replace_language_once

replace_language_once()

# Interpreting takes long, and these cases differ from others in nothing that the kernels branch on.
LIKE_OTHERS = {
    *(f"{heads} heads over 2" for heads in (4, 6, 8, 10, 12, 14)),
    *(f"block size {size}" for size in (2, 4, 8, 48, 64, 128, 256)),
    *(f"window {size}" for size in (5, 128)),
    *(f"bfloat16, head size {size}" for size in (64, 96, 256)),
    *(f"float16, head size {size}" for size in (64, 128)),
    *(f"{dtype}, layers of several kinds" for dtype in ("bfloat16", "float16")),
}

FORMATS = [
    f"{element}{scaling}"
    for element in ("fp8_e4m3", "fp8_e5m2", "int8", "int4")
    for scaling in ("", "_token_head")
]
# Every format once, and what each kind of layout may do differently.
CODED = [
    *((name, "plain") for name in FORMATS),
    ("int4_token_head", "head size 80"),
    ("fp8_e5m2", "bfloat16, head size 128"),
    ("fp8_e4m3_token_head", "bfloat16, head size 128"),
    ("int4_token_head", "layers of several kinds"),
]
moved = pytest.mark.parametrize(
    "case",
    [PLAIN, replace(KINDS, dtype=torch.bfloat16)],
    ids=["one layer", "bfloat16, layers of several kinds"],
)


class TestTritonPaged(AttentionSuite):
    backend = "triton_paged"
    scale = "small"

    @classmethod
    def sizes(cls):
        return replace(super().sizes(), contexts=(1, 17, 300, 4200), long_context=400)

    @pytest.mark.parametrize("name", [name for name in CASES if name not in LIKE_OTHERS])
    def test_decodes_chunks_and_prefix_hits_mix(self, name):
        super().test_decodes_chunks_and_prefix_hits_mix(name)

    @pytest.mark.parametrize("pair", CODED, ids=": ".join)
    def test_every_kv_format_is_right_or_refused(self, pair):
        super().test_every_kv_format_is_right_or_refused(*pair)

    @pytest.mark.parametrize("name", ["int4_token_head"])
    def test_coded_blocks_are_moved_unchanged(self, name):
        super().test_coded_blocks_are_moved_unchanged(name)

    @pytest.mark.parametrize("name", ["fp8_e4m3_token_head", "int4_token_head"])
    def test_k_is_rotated_before_it_is_coded(self, name):
        super().test_k_is_rotated_before_it_is_coded(name)

    @moved
    def test_copies_are_exact_and_happen_all_at_once(self, case):
        super().test_copies_are_exact_and_happen_all_at_once(case)

    @moved
    def test_swapped_blocks_come_back_elsewhere(self, case):
        super().test_swapped_blocks_come_back_elsewhere(case)


def stored(rig, x):
    """``x`` (``[n, num_kv_heads, head_size]``), stored as K and as V and read as the bytes that
    the format says: uint8 ``[2, n, num_kv_heads, bytes of a vector]``."""
    size, (n, heads, head_size) = rig.spec.block_size, x.shape
    width = rig.quantizer.bytes_per_vector(head_size)
    codes = width - 4 * (rig.spec.layout.scaling == "token_head")
    blocks = [rig.take() for _ in range(-(-n // size))]
    rig.backend.plan(rig._batch([(blocks, 0, n)]))
    rig.backend.store(0, x, x)
    parts = rig.read(blocks).view(len(blocks), 2, heads, size * width)
    vectors = torch.cat(
        [
            parts[..., : size * codes].unflatten(-1, (size, codes)),
            parts[..., size * codes :].unflatten(-1, (size, width - codes)),
        ],
        dim=-1,
    )
    return vectors.permute(1, 0, 3, 2, 4).flatten(1, 2)[:, :n]


def awkward_vectors(dtype):
    """``[128, 2, 48]``: of all magnitudes, many halfway between codes, and what is no number."""
    x = torch.randn(128, 2, 48) * torch.logspace(-12, 12, 128, base=10).view(-1, 1, 1)
    x[:40] = torch.randint(-40, 40, (40, 2, 48)) / 2
    x[:40, :, 0] = torch.tensor([127.0, 448.0, 15.0, 7.5, 0.0]).repeat(8).unsqueeze(1)
    x[40:56] = torch.randint(-40, 40, (16, 2, 48)) * 2.0**-12
    x[56:64] = torch.randint(-40, 40, (8, 2, 48)) * 2.0**-18
    x[64:67] = torch.tensor([0.0, torch.inf, -torch.inf]).view(-1, 1, 1)
    x[67:70, 1, 5] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_codes_are_those_of_the_format_to_the_bit(name, dtype):
    torch.manual_seed(0)
    rig = TestTritonPaged().rig(Case((layer(2, 2, 48),), dtype, quantizer=name))
    x = awkward_vectors(dtype)
    expected = rig.quantizer.encode(x, 0, "k").expand(2, -1, -1, -1)
    actual = stored(rig, x)
    values, wanted = (rig.quantizer.decode(data, 0, "k", dtype) for data in (actual, expected))
    assert torch.equal(values.isnan(), wanted.isnan())  # which NaN it is does not matter
    same = wanted.isnan().any(-1, keepdim=True) | (actual == expected)
    assert same.all(), (actual[~same], expected[~same])


@pytest.mark.parametrize("name", FORMATS)
def test_a_nan_is_read_as_nan(name):
    rig = TestTritonPaged().rig(Case((layer(2, 2, 16),), quantizer=name))
    for broken in ("k", "v"):
        q, k, v = rig.draw(0, 20)
        (k if broken == "k" else v)[7, 1, 3] = torch.nan
        out = torch.zeros_like(q)
        rig.backend.plan(rig._batch([([rig.take(), rig.take()], 0, 20)]))
        rig.backend.forward(0, q, k, v, out)
        assert out[7:, 1, 3].isnan().all()
        assert not out[:, 0].isnan().any()


class Scaled:
    """Makes constant scales other than one the default of a format."""

    @dataclass
    class Config:
        k_scale: float = 0.013
        v_scale: float = 0.37


@pytest.mark.parametrize("name", ["fp8_e5m2", "int4"])
def test_constant_scales_are_those_of_k_and_v(name):
    format_ = Plugins.load().get("kv_quantizer", name)
    scaled = type("Scaled", (format_,), {"Config": Scaled.Config})
    candidate = replace(TestTritonPaged.candidate(), quantizers={name: lambda: scaled})
    layers = (layer(), layer(softcap=5.0, sinks=True))
    rig = Rig(candidate, Case(layers, quantizer=name))
    branch, other = Branch(), Branch()
    rig.step((branch, 40), (other, 1))
    rig.step((branch, 1), (other, 20))


@pytest.mark.parametrize("name", [name for name in FORMATS if name.endswith("token_head")])
def test_small_values_do_not_vanish_in_float16(name, monkeypatch):
    """Not even where weights times the scales of V would be too small for that dtype."""
    rig = TestTritonPaged().rig(Case((layer(2, 1),), torch.float16, quantizer=name))
    monkeypatch.setattr(rig.backend, "_products", torch.float16)
    rig.backend._inverses, rig.backend._scales = rig.backend._fold_scales()
    q, k, v = rig.draw(0, 60)
    v = v * 1e-3
    out = torch.empty_like(q)
    rig.backend.plan(rig._batch([([rig.take() for _ in range(4)], 0, 60)]))
    rig.backend.forward(0, q, k, v, out)
    keys, values = rig._stored(k, 0, "k"), rig._stored(v, 0, "v")
    expected = attention(q, torch.arange(60), keys, values, rig.spec.layers[0], None)
    assert excess(out, expected, 2e-3).max() <= 1


SPLIT = [
    Case((layer(2, 1, 80, window=40, softcap=3.0, sinks=True),), block_size=3),
    Case((layer(3, 1),), torch.bfloat16),
    Case((layer(20, 1, 16),)),
    Case((layer(2, 1, 80),), quantizer="int4_token_head"),
    Case((layer(2, 1),), quantizer="int8"),
]


@pytest.mark.parametrize(
    "case",
    SPLIT,
    ids=["window, softcap and sinks", "bfloat16", "20 heads", "int4 token_head", "int8"],
)
def test_the_tokens_of_a_row_may_be_split(case, monkeypatch):
    """On a chip so large that even the few tokens of this test are divided."""
    monkeypatch.setattr(backend, "INTERPRETER", Chip("interpreter", processors=24))
    monkeypatch.setattr(work, "LEAST_SPLIT", 1)
    monkeypatch.setattr(backend, "choose", lambda *shape: Tiles(16, 16, 1, 1))
    rig = TestTritonPaged().rig(case)
    merged = []
    launched = rig.backend._plan_layers

    def watched(*arguments):
        launch = launched(*arguments)
        merged.append(int((launch.merges.view(-1, 4)[:, 3] > 1).sum()))
        return launch

    monkeypatch.setattr(rig.backend, "_plan_layers", watched)
    first, second = Branch(), Branch()
    rig.step((first, 50), (second, 7))
    rig.step((first, 1), (second, 23))
    rig.step((first, 1), (second, 1))
    assert all(merged[-3:])


def test_decode_steps_of_one_size_are_launched_alike():
    """So that a CUDA graph of one serves all."""
    case = Case((layer(9, 3),))
    rig = TestTritonPaged().rig(case)
    launches = []
    for lengths in ([5, 700, 3], [64, 1, 1]):
        batch = rig._batch([([0] * 44, length - 1, 1) for length in lengths])
        rig.backend.plan(batch)
        launch = rig.backend._launches[case.layers[0]]
        launches.append(
            (launch.items.data_ptr(), launch.items.shape, launch.merges.shape, launch.merge_rows)
        )
    assert launches[0] == launches[1]
    assert torch.count_nonzero(launch.merges) == 0  # the second step is too short to be split


def test_an_engine_answers_as_with_torch_paged(tmp_path):
    write_model(tmp_path)
    path = tmp_path / "engine.yaml"
    path.write_text(
        f"model: {{path: {tmp_path}, loader: dummy, dtype: float32,"
        " options: {initializer_range: 0.5}}\n"
        "runtime: {device: cpu, num_threads: 1, debug: true}\n"
        "scheduler: {max_num_batched_tokens: 16}\n"
        "kv_cache: {block_size: 4, num_blocks: 20}\n"
    )
    prompts = [list(range(1, 30)), list(range(1, 21)), [5], [7, 7, 7]]
    answers = []
    for name in ("torch_paged", "triton_paged"):
        engine = Engine.from_config(path, [f"attention.backend={name}"])
        outputs = engine.generate(prompts, SamplingParams(temperature=0, max_tokens=12))
        answers.append([output.outputs[0].token_ids for output in outputs])
    assert answers[0] == answers[1]
    assert sum(map(len, answers[0])) > 20
