"""The dummy loader makes the same random weights every time, for any configuration."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from pageloom.models.dummy import DummyLoader
from pageloom.models.repeated_random import PERIOD

IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": None}
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
CONFIGS = {
    "llama": LlamaConfig(**SIZES, **IDS, num_key_value_heads=2),
    "qwen2, tied": Qwen2Config(**SIZES, **IDS, num_key_value_heads=2, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(**SIZES, **IDS, num_key_value_heads=2, head_dim=8),
    "gpt2": GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=4, **IDS),
    "gpt_neox": GPTNeoXConfig(**SIZES, **IDS),
}


def dummy(path: Path | str, **options: Any) -> DummyLoader:
    return DummyLoader(DummyLoader.Config(**options), str(path))


def weights(path: Path | str, **options: Any) -> dict[str, torch.Tensor]:
    return dict(dummy(path, **options).tensors())


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    CONFIGS["llama"].save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", CONFIGS)
def test_it_fills_every_tensor_of_the_model(tmp_path: Path, name: str) -> None:
    config: PretrainedConfig = CONFIGS[name]
    config.save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = dict(model.named_parameters())  # tied weights once
    tensors = weights(tmp_path)
    assert tensors.keys() == expected.keys()
    assert {n: t.shape for n, t in tensors.items()} == {n: p.shape for n, p in expected.items()}
    model.load_state_dict(tensors, strict=False)
    logits = model(torch.arange(20)[None]).logits
    assert logits.isfinite().all()
    assert logits.std() > 1e-3


def test_it_is_the_same_every_time(llama: Path) -> None:
    first, second = weights(llama), weights(llama / "config.json")
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_another_seed_changes_every_tensor(llama: Path) -> None:
    first, second = weights(llama), weights(llama, seed=1)
    assert not any(torch.equal(first[name], second[name]) for name in first)


def test_no_two_tensors_are_alike_and_none_is_neutral(llama: Path) -> None:
    tensors = list(weights(llama).values())
    for i, tensor in enumerate(tensors):
        assert tensor.std() > 0.005
        assert not any(torch.equal(tensor, other) for other in tensors[:i])


def test_norm_weights_are_near_one(llama: Path) -> None:
    norms = [tensor for name, tensor in weights(llama).items() if "norm" in name]
    assert len(norms) == 5
    assert all(norm.min() > 0.8 and norm.max() < 1.2 for norm in norms)


def test_the_range_sets_the_spread(llama: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    assert weights(llama)[name].std() == pytest.approx(0.02, rel=0.1)
    assert weights(llama, initializer_range=0.1)[name].std() == pytest.approx(0.1, rel=0.1)
    assert dummy(llama, initializer_range=0.1).model_config().initializer_range == 0.1


def test_large_tensors_repeat_their_numbers_but_no_row(tmp_path: Path) -> None:
    sizes = SIZES | {"vocab_size": 3 * 4096, "hidden_size": 256}
    LlamaConfig(**sizes, **IDS).save_pretrained(tmp_path)
    tensors = weights(tmp_path)
    embedding = tensors["model.embed_tokens.weight"]
    assert embedding.numel() > 2 * PERIOD
    flat = embedding.flatten()
    assert torch.equal(flat[PERIOD:], flat[:-PERIOD])
    assert embedding.std() == pytest.approx(0.02, rel=0.01)
    assert abs(embedding.mean()) < 1e-4
    assert len(embedding.unique(dim=0)) == len(embedding)
    assert torch.linalg.matrix_rank(embedding) == 256
    assert not torch.equal(embedding, tensors["lm_head.weight"])
    torch.testing.assert_close(weights(tmp_path)["lm_head.weight"], tensors["lm_head.weight"])


def test_the_dtype_is_that_of_the_configuration(tmp_path: Path) -> None:
    LlamaConfig(**SIZES, **IDS, dtype="bfloat16").save_pretrained(tmp_path)
    assert {tensor.dtype for tensor in weights(tmp_path).values()} == {torch.bfloat16}


def test_the_random_state_of_others_is_left_alone(llama: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    weights(llama)
    assert torch.equal(torch.rand(3), expected)


def test_the_tokenizer_is_that_of_the_folder(llama: Path) -> None:
    assert dummy(llama).tokenizer() is None
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="a").save_pretrained(llama)
    tokenizer = dummy(llama / "config.json").tokenizer()
    assert tokenizer is not None
    assert tokenizer.encode("b") == [1]


def test_it_is_used_only_when_named(llama: Path) -> None:
    assert not DummyLoader.detect(str(llama))
    assert not DummyLoader.detect("org/name")


@pytest.mark.parametrize("spread", [-0.1, math.nan, math.inf, -math.inf])
def test_a_range_that_is_no_spread_is_refused(spread: float) -> None:
    with pytest.raises(ValueError, match="initializer_range must be 0 or more and finite"):
        DummyLoader.Config(initializer_range=spread)


def test_a_missing_configuration_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=rf"{tmp_path} has no config\.json"):
        dummy(tmp_path).model_config()
