"""GGUF layers that stay packed compute what the expanded ones do."""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf_writing import tiny_model, write_gguf
from transformers import LlamaConfig, Qwen2Config

from pageloom.contract import native
from pageloom.models.build import build_model
from pageloom.models.model import Attend, Model
from pageloom_quant.gguf import GGUFLoader
from pageloom_quant.gguf.blocks import BITS, packed_weight
from pageloom_quant.gguf.dequantize import dequantize
from pageloom_quant.gguf.reader import GGUFFile
from pageloom_quant.packed import cpu
from reference import DenseAttention

Q4_0, Q4_1, Q8_0 = BITS
Q5_0 = GGMLQuantizationType.Q5_0
SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA = LlamaConfig(**SIZES)
TIED = LlamaConfig(**SIZES, tie_word_embeddings=True)
BIASED = LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)
QWEN = Qwen2Config(**SIZES)
CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(
    native.find_compiler() is None, reason="there is no C++ compiler"
)


def write(
    folder: Path,
    config: LlamaConfig | Qwen2Config,
    kind: Callable[[str], GGMLQuantizationType | None],
) -> Path:
    return write_gguf(folder / "model.gguf", tiny_model(config), config.model_type, {}, kind=kind)


def build(
    path: Path, dequantize: bool | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Model, GGUFLoader]:
    loader = GGUFLoader(GGUFLoader.Config(dequantize=dequantize), str(path))
    config = loader.model_config()
    model = build_model(loader, config, dtype=dtype, device=CPU, max_model_len=64)
    return model, loader


def logits(model: Model, tokens: int = 40) -> torch.Tensor:
    ids = torch.randint(model.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0))
    attend = DenseAttention(model.layers).step([(0, tokens)])
    return model.logits(model.forward(ids, torch.arange(tokens), Attend(attend)))


def formats(model: Model) -> list[str]:
    """Of the linear layers: what is packed, and ``plain``."""
    modules = [part for part in model.weights() if isinstance(part, torch.nn.Module)]
    return [getattr(module, "weight_format", "plain") for module in modules]


@pytest.mark.parametrize("kind", BITS)
def test_packed_blocks_are_the_expanded_numbers(kind: GGMLQuantizationType) -> None:
    group, size = GGML_QUANT_SIZES[kind]
    rows = torch.randint(256, (7, 5 * size), generator=torch.Generator().manual_seed(0)).byte()
    blocks = rows.view(-1, size)
    blocks[:, 1:4:2] &= 0xBF  # scales and minimums that are finite
    weight = packed_weight(rows, kind)
    assert (weight.out_features, weight.in_features) == (7, 5 * group)
    torch.testing.assert_close(
        weight.dequantize(torch.float32), dequantize(rows, kind), rtol=1e-6, atol=1e-6
    )


@needs_compiler
@pytest.mark.parametrize("config", [LLAMA, TIED, BIASED, QWEN], ids=["", "tied", "biased", "qwen"])
@pytest.mark.parametrize("kind", BITS)
def test_packed_layers_compute_what_expanded_ones_do(tmp_path, config, kind):
    """In float32, where the packed and the expanded weight are the same numbers."""
    path = write(tmp_path, config, lambda name: kind)
    (packed, _), (expanded, _) = build(path), build(path, dequantize=True)
    assert set(formats(packed)) == {"int8" if kind is Q8_0 else "int4"}
    assert set(formats(expanded)) == {"plain"}
    expected = logits(expanded)
    assert expected.std() > 0.3
    torch.testing.assert_close(logits(packed), expected, atol=1e-4, rtol=1e-4)


@needs_compiler
def test_what_cannot_stay_packed_expands_and_one_line_says_so(tmp_path, caplog):
    kinds = {
        "blk.0.attn_q": Q4_0,  # merges with Q4_1
        "blk.0.attn_v": Q4_1,
        "blk.1.attn_q": Q8_0,  # merged with 4 bits
        "blk.0.ffn_down": Q5_0,
        "blk.1.ffn_up": None,
        "output": Q8_0,
    }

    def kind(name: str) -> GGMLQuantizationType | None:
        return kinds.get(name.removesuffix(".weight"), Q4_1)

    path = write(tmp_path, LLAMA, kind)
    with caplog.at_level(logging.WARNING):
        packed, _ = build(path)
    # The output layer, then qkv, o, gate and up, and down of each layer.
    first, second = ["int4", "int4", "int4", "plain"], ["plain", "int4", "plain", "int4"]
    assert formats(packed) == ["int8", *first, *second]
    (line,) = caplog.messages
    assert line == (
        f"{path}: linear layers of types Q4_1, Q5_0, Q8_0 are expanded; those that are all "
        "Q4_0 or Q4_1, or all Q8_0, stay packed"
    )
    expected = logits(build(path, dequantize=True)[0])
    torch.testing.assert_close(logits(packed), expected, atol=1e-4, rtol=1e-4)


@needs_compiler
def test_unquantized_files_need_no_line(tmp_path, caplog):
    model, _ = build(write(tmp_path, LLAMA, lambda name: None))
    assert set(formats(model)) == {"plain"}
    assert not caplog.messages


def test_without_a_compiler_everything_expands_and_one_line_says_so(tmp_path, monkeypatch, caplog):
    path = write(tmp_path, LLAMA, lambda name: Q4_0)
    monkeypatch.setenv("CXX", "no-such-compiler")
    cpu.forget_library()
    try:
        with caplog.at_level(logging.WARNING):
            expanded, _ = build(path)
        kept, _ = build(path, dequantize=False)
    finally:
        cpu.forget_library()
    assert set(formats(expanded)) == {"plain"}
    assert caplog.messages[0] == (
        f"{path}: all weights are expanded to float32: there is no C++ compiler: install one "
        "(c++), or set CXX"
    )
    assert set(formats(kept)) == {"int4"}  # as was asked for
    torch.testing.assert_close(logits(kept), logits(expanded), atol=1e-4, rtol=1e-4)


@needs_compiler
@pytest.mark.parametrize("number", [float("nan"), float("-inf")], ids=str)
@pytest.mark.parametrize("expand", [False, True], ids=["packed", "expanded"])
@pytest.mark.parametrize("kind", [*BITS, Q5_0])
def test_scales_that_are_not_finite_are_named(tmp_path, kind, expand, number):
    path = write(tmp_path, LLAMA, lambda name: kind)
    name = "blk.1.ffn_down.weight"
    content = bytearray(path.read_bytes())
    struct.pack_into("<e", content, GGUFFile(path).tensors[name].offset, number)
    path.write_bytes(content)
    message = rf"{path} has scales in the {kind.name} blocks of tensor '{name}' that are not finite"
    with pytest.raises(ValueError, match=message):
        build(path, dequantize=expand)


@needs_compiler
def test_a_model_that_asks_for_no_layer_gets_every_tensor(tmp_path):
    path = write(tmp_path, TIED, lambda name: Q4_1)
    plain, asked = (GGUFLoader(GGUFLoader.Config(), str(path)) for _ in range(2))
    everything = dict(plain.tensors())
    layer = asked.linear(["model.layers.0.mlp.down_proj"], 96, [64], False, torch.float32, CPU)
    head = asked.linear(["lm_head"], 64, [96], False, torch.float32, CPU)
    rest = dict(asked.tensors())
    assert set(everything) - set(rest) == {"model.layers.0.mlp.down_proj.weight"}
    x = torch.randn(3, 96)
    expected = x @ everything["model.layers.0.mlp.down_proj.weight"].T
    torch.testing.assert_close(layer(x), expected, atol=1e-4, rtol=1e-4)
    expected = x[:, :64] @ everything["model.embed_tokens.weight"].T
    torch.testing.assert_close(head(x[:, :64]), expected, atol=1e-4, rtol=1e-4)


@needs_compiler
def test_the_demo_model_packed_is_the_demo_model(demo_path):
    """In float32 the same numbers but for the order of sums. In bfloat16 the packed weights, which
    are not rounded to it, are about as near to that as the expanded ones."""
    exact = logits(build(demo_path, dequantize=True)[0])
    packed, _ = build(demo_path)
    assert set(formats(packed)) == {"int4", "int8"}
    torch.testing.assert_close(logits(packed), exact, atol=2e-3, rtol=1e-3)
    distances = [
        float((logits(build(demo_path, choice, torch.bfloat16)[0]) - exact).square().mean())
        for choice in (None, True)
    ]
    assert distances[0] < 1.5 * distances[1] < 0.01 * float(exact.square().mean())
