"""The demo model: SmolLM2-135M-Instruct from its GGUF file."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from pageloom_quant.gguf import GGUFLoader


@pytest.fixture
def loader(demo_path: Path) -> GGUFLoader:
    return GGUFLoader(GGUFLoader.Config(), str(demo_path))


def test_its_configuration_is_that_of_the_published_model(loader: GGUFLoader) -> None:
    config = loader.model_config()
    published = {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-05,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": 1,
        "pad_token_id": 2,
        "rope_parameters": {"rope_theta": 100000.0, "rope_type": "default"},
    }
    assert {key: getattr(config, key) for key in published} == published
    assert config.eos_token_id == [2, 0]  # <|im_end|>, and <|endoftext|>


def test_its_tensors_are_those_of_the_model(
    loader: GGUFLoader, demo_reference: gguf.GGUFReader
) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(loader.model_config())
    expected = {name: p.shape for name, p in model.named_parameters()}
    shapes = {}
    for name, tensor in loader.tensors():
        shapes[name] = tensor.shape
        if name == "model.layers.7.mlp.down_proj.weight":
            stored = next(t for t in demo_reference.tensors if t.name == "blk.7.ffn_down.weight")
            unpacked = gguf.dequantize(stored.data, stored.tensor_type)
            assert np.array_equal(tensor.numpy(), unpacked)
    assert shapes == expected


def test_it_answers_a_question(loader: GGUFLoader) -> None:
    """Weights, configuration, tokenizer and template together, through transformers alone."""
    config = loader.model_config()
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config).eval()
    model.load_state_dict(dict(loader.tensors()), strict=False)
    tokenizer = loader.tokenizer()
    assert tokenizer is not None
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    assert "Paris" in answer


def test_importing_the_loader_imports_no_torch() -> None:
    code = "import sys, pageloom_quant.gguf; print('torch' in sys.modules, 'gguf' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["b.gguf", "a.gguf", "c.bin"], r"is a folder, .* as model\.path: a\.gguf, b\.gguf$"),
        ([f"{n}.gguf" for n in range(7)], r"4\.gguf and 2 more$"),
        (["model.safetensors"], r"is a folder without \.gguf files, .* model\.loader to auto$"),
    ],
)
def test_of_a_folder_it_is_said_which_files_could_be_read(
    tmp_path: Path, files: list[str], message: str
) -> None:
    for name in files:
        (tmp_path / name).touch()
    with pytest.raises(ValueError, match=message) as raised:
        GGUFLoader(GGUFLoader.Config(), str(tmp_path)).model_config()
    assert str(raised.value).startswith(f"{tmp_path} is a folder")


def test_what_does_not_exist_is_said_to_be_no_file(tmp_path: Path) -> None:
    loader = GGUFLoader(GGUFLoader.Config(), str(tmp_path / "none.gguf"))
    with pytest.raises(ValueError, match=r"none\.gguf does not exist; model\.path must name a \.g"):
        loader.tokenizer()
