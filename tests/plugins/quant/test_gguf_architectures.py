"""A model written to GGUF comes back as the same tensors and computes the same logits."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf_writing import VOCAB, tiny_model, write_gguf
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Starcoder2Config,
)

from pageloom_quant.gguf import GGUFLoader
from pageloom_quant.gguf.architectures import ARCHITECTURES

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
TIED = {"tie_word_embeddings": True}
THETA = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.3, 1.5],
    "long_factor": [1.0, 1.7, 3.0, 4.0],
}
SOFTCAPS = {
    "gemma2.attn_logit_softcapping": 50.0,
    "gemma2.final_logit_softcapping": 30.0,
    "gemma2.attention.sliding_window": 8,
}


def llama3_factors() -> np.ndarray:
    """``rope_freqs.weight`` as llama.cpp computes it from `LLAMA3`."""
    factors = []
    for i in range(0, 8, 2):
        wavelength = 2 * math.pi * LLAMA3["rope_theta"] ** (i / 8)
        low, high = (
            LLAMA3["original_max_position_embeddings"] / LLAMA3[key]
            for key in ("low_freq_factor", "high_freq_factor")
        )
        if wavelength < high:
            factors.append(1.0)
        elif wavelength > low:
            factors.append(LLAMA3["factor"])
        else:
            smooth = (LLAMA3["original_max_position_embeddings"] / wavelength - 1.0) / (4.0 - 1.0)
            factors.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(factors, dtype=np.float32)


def longrope_tensors() -> dict[str, np.ndarray]:
    return {
        f"rope_factors_{kind}.weight": np.array(LONGROPE[f"{kind}_factor"], dtype=np.float32)
        for kind in ("long", "short")
    }


CASES = {
    "llama": ("llama", LlamaConfig(**SIZES, rope_parameters=THETA), {"llama.rope.freq_base": 5e3}),
    "llama tied": ("llama", LlamaConfig(**SIZES, **TIED), {}),
    "llama with biases": ("llama", LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True), {}),
    "llama with wide heads": (
        "llama",
        LlamaConfig(**SIZES, head_dim=16),
        {},
    ),
    "llama without optional keys": (
        "llama",
        LlamaConfig(**SIZES),
        {
            "llama.attention.key_length": None,
            "llama.attention.value_length": None,
            "llama.rope.dimension_count": None,
        },
    ),
    "llama 3.1 frequencies": (
        "llama",
        LlamaConfig(**SIZES, rope_parameters=LLAMA3),
        {"llama.rope.freq_base": 500.0},
        {"rope_freqs.weight": llama3_factors()},
    ),
    "llama with linear scaling": (
        "llama",
        LlamaConfig(
            **SIZES,
            rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        ),
        {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 2.0},
    ),
    "llama with yarn": (
        "llama",
        LlamaConfig(**SIZES, rope_parameters=YARN),
        {
            "llama.rope.scaling.type": "yarn",
            "llama.rope.scaling.factor": 4.0,
            "llama.rope.scaling.original_context_length": 32,
        },
    ),
    "mistral with a window": (
        "llama",
        MistralConfig(**SIZES, sliding_window=8),
        {"llama.attention.sliding_window": 8},
    ),
    "qwen2": ("qwen2", Qwen2Config(**SIZES, **TIED), {}),
    "qwen3": ("qwen3", Qwen3Config(**SIZES, head_dim=16), {}),
    "phi3": ("phi3", Phi3Config(**SIZES, sliding_window=8), {"phi3.attention.sliding_window": 8}),
    "phi3 with partial rotation": (
        "phi3",
        Phi3Config(**SIZES, rope_parameters={**THETA, "partial_rotary_factor": 0.5}),
        {"phi3.rope.dimension_count": 4, "phi3.rope.freq_base": 5000.0},
    ),
    "phi3 with longrope": (
        "phi3",
        Phi3Config(**SIZES, original_max_position_embeddings=24, rope_parameters=LONGROPE),
        {
            "phi3.rope.scaling.original_context_length": 24,
            "phi3.rope.scaling.attn_factor": math.sqrt(1 + math.log(128 / 24) / math.log(24)),
        },
        longrope_tensors(),
    ),
    "gemma": ("gemma", GemmaConfig(**SIZES, head_dim=16), {}),
    "gemma2": (
        "gemma2",
        Gemma2Config(**SIZES, head_dim=16, query_pre_attn_scalar=16, sliding_window=8),
        SOFTCAPS,
    ),
    "gemma2 27B": (
        "gemma2",
        Gemma2Config(
            **{**SIZES, "num_hidden_layers": 46, "hidden_size": 16},
            head_dim=8,
            query_pre_attn_scalar=4,
            sliding_window=8,
        ),
        SOFTCAPS,
    ),
    "gemma3": (
        "gemma3",
        Gemma3TextConfig(
            **{**SIZES, "num_hidden_layers": 7},
            head_dim=16,
            query_pre_attn_scalar=16,
            sliding_window=8,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        ),
        {
            "gemma3.attention.sliding_window": 8,
            "gemma3.rope.freq_base": 1e6,
            "gemma3.rope.scaling.type": "linear",
            "gemma3.rope.scaling.factor": 8.0,
        },
    ),
    "starcoder2": ("starcoder2", Starcoder2Config(**SIZES, use_bias=True), {}),
    "starcoder2 without biases": ("starcoder2", Starcoder2Config(**SIZES, use_bias=False), {}),
    "olmo2": ("olmo2", Olmo2Config(**SIZES), {}),
}


@pytest.fixture(params=CASES, scope="module")
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[PreTrainedModel, GGUFLoader]:
    """A model, and the loader of the file it was written to."""
    architecture, config, keys, *extra = CASES[request.param]
    model = tiny_model(config)
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write_gguf(path, model, architecture, keys, *extra)
    return model, GGUFLoader(GGUFLoader.Config(), str(path))


def test_every_supported_architecture_is_covered() -> None:
    assert {case[0] for case in CASES.values()} == set(ARCHITECTURES)


def test_tensors_are_the_state_dict(case: tuple[PreTrainedModel, GGUFLoader]) -> None:
    model, loader = case
    expected = model.state_dict()
    if model.config.tie_word_embeddings:
        del expected["lm_head.weight"]
    loaded = {name: tensor.clone() for name, tensor in loader.tensors()}
    assert loaded.keys() == expected.keys()
    for name, tensor in expected.items():
        # Gemma's stored 1 + w rounds; everything else is the same number.
        torch.testing.assert_close(loaded[name], tensor, rtol=0, atol=1e-6, msg=name)


def test_logits_are_the_same(case: tuple[PreTrainedModel, GGUFLoader]) -> None:
    model, loader = case
    config: PretrainedConfig = loader.model_config()
    again = AutoModelForCausalLM.from_config(config).eval()
    missing, unexpected = again.load_state_dict(dict(loader.tensors()), strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    again.tie_weights()
    ids = torch.arange(40).remainder(VOCAB)[None]
    with torch.no_grad():
        torch.testing.assert_close(again(ids).logits, model(ids).logits, rtol=2e-4, atol=2e-4)


def test_the_unsupported_is_refused_by_name(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_model(LlamaConfig(**SIZES)), "llama")
    data = path.read_bytes().replace(b"llama", b"mamba")
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"a\.gguf has architecture 'mamba'.*gemma2, .*qwen3"):
        GGUFLoader(GGUFLoader.Config(), str(path)).model_config()


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"split.count": 3}, "one of 3 parts"),
        ({"llama.rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
        ({"llama.rope.dimension_count": 4}, "rotates 4 of 8"),
        ({"llama.attention.value_length": 16}, "keys of length 8 and values of length 16"),
        ({"llama.block_count": None}, "no metadata key 'llama.block_count'"),
        ({"llama.block_count": 0}, "0 in metadata key 'llama.block_count'"),
        ({"llama.block_count": "three"}, "str in metadata key 'llama.block_count', not int"),
        ({"llama.attention.head_count_kv": 3}, "must divide"),
        ({"llama.attention.layer_norm_rms_epsilon": None}, "layer_norm_rms_epsilon"),
        (
            {"llama.attention.layer_norm_rms_epsilon": math.nan},
            "nan in metadata key 'llama.attention.layer_norm_rms_epsilon', which must be above 0",
        ),
        ({"llama.attention.layer_norm_rms_epsilon": -1.0}, "has -1 in metadata key"),
        ({"llama.rope.freq_base": 0.0}, "has 0 in metadata key 'llama.rope.freq_base'"),
        (
            {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": math.inf},
            "has inf in metadata key 'llama.rope.scaling.factor'",
        ),
        (
            {
                "llama.rope.scaling.type": "yarn",
                "llama.rope.scaling.factor": 2.0,
                "llama.rope.scaling.attn_factor": math.nan,
            },
            "has nan in metadata key 'llama.rope.scaling.attn_factor'",
        ),
        ({"tokenizer.ggml.tokens": ["a"] * 97}, "97 tokens but only 96 embeddings"),
        ({"tokenizer.ggml.tokens": ["a"], "tokenizer.ggml.eos_token_id": 1}, "outside its 1"),
    ],
)
def test_metadata_that_cannot_be_used_is_named(
    tmp_path: Path, keys: dict[str, object], message: str
) -> None:
    path = write_gguf(tmp_path / "a.gguf", tiny_model(LlamaConfig(**SIZES)), "llama", keys)
    with pytest.raises(ValueError, match=r"a\.gguf ") as raised:
        GGUFLoader(GGUFLoader.Config(), str(path)).model_config()
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda name, a: None if name == "blk.1.attn_k.weight" else a, "no tensor 'blk.1.attn_k"),
        (lambda name, a: None if name == "token_embd.weight" else a, "no tensor 'token_embd"),
        (
            lambda name, a: a[:, :16] if name == "blk.2.ffn_up.weight" else a,
            r"shape [48, 16] in tensor 'blk.2.ffn_up.weight', where its metadata gives [48, 32]",
        ),
        (
            lambda name, a: a.astype(np.int32) if name == "blk.0.attn_norm.weight" else a,
            "type I32 in tensor 'blk.0.attn_norm.weight'",
        ),
    ],
)
def test_a_tensor_that_cannot_be_used_is_named(tmp_path: Path, change, message: str) -> None:
    model = tiny_model(LlamaConfig(**SIZES))
    path = write_gguf(tmp_path / "a.gguf", model, "llama", change=change)
    with pytest.raises(ValueError, match=r"a\.gguf ") as raised:
        dict(GGUFLoader(GGUFLoader.Config(), str(path)).tensors())
    assert message in str(raised.value)


@pytest.mark.parametrize("dimensions", [0, 3, 16])
def test_a_rotation_that_no_head_can_have_is_named(tmp_path: Path, dimensions: int) -> None:
    keys = {"phi3.rope.dimension_count": dimensions}
    path = write_gguf(tmp_path / "a.gguf", tiny_model(Phi3Config(**SIZES)), "phi3", keys)
    with pytest.raises(ValueError, match=rf"a\.gguf rotates {dimensions} dimensions .* 2 to 8"):
        GGUFLoader(GGUFLoader.Config(), str(path)).model_config()


def test_frequencies_that_are_no_numbers_are_named(tmp_path: Path) -> None:
    extra = {"rope_freqs.weight": np.ones(4, dtype=np.int32)}
    path = tmp_path / "a.gguf"
    write_gguf(path, tiny_model(LlamaConfig(**SIZES)), "llama", extra=extra)
    with pytest.raises(ValueError, match=r"a\.gguf has type I32 in tensor 'rope_freqs\.weight'"):
        GGUFLoader(GGUFLoader.Config(), str(path)).model_config()


def test_a_tensor_that_the_architecture_lacks_is_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(8, dtype=np.float32)}
    path = tmp_path / "a.gguf"
    write_gguf(path, tiny_model(LlamaConfig(**SIZES)), "llama", extra=extra)
    with pytest.raises(ValueError, match=r"'blk\.0\.attn_q_norm\.weight', which is unknown"):
        dict(GGUFLoader(GGUFLoader.Config(), str(path)).tensors())


def test_a_window_with_biases_is_refused(tmp_path: Path) -> None:
    model = tiny_model(LlamaConfig(**SIZES, attention_bias=True))
    path = tmp_path / "a.gguf"
    write_gguf(path, model, "llama", {"llama.attention.sliding_window": 8})
    with pytest.raises(ValueError, match="a sliding window and biases"):
        GGUFLoader(GGUFLoader.Config(), str(path)).model_config()
