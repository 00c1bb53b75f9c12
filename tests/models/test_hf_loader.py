"""The hf loader reads what transformers saved, and nothing else."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from pageloom.models.hf import HFLoader


def hf(path: Path | str, **options: Any) -> HFLoader:
    return HFLoader(HFLoader.Config(**options), str(path))


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, vocab_size=64, eos_token_id=2, dtype="bfloat16")
    return LlamaForCausalLM(config).to(torch.bfloat16)


@pytest.fixture
def saved(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    """The model in one file, with a tokenizer."""
    model.save_pretrained(tmp_path)
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(model: LlamaForCausalLM, tmp_path: Path) -> Path:
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise AssertionError(f"connected to {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.mark.parametrize("layout", ["saved", "sharded"])
def test_every_tensor_comes_as_it_was_stored(
    layout: str, model: LlamaForCausalLM, request: pytest.FixtureRequest
) -> None:
    tensors = dict(hf(request.getfixturevalue(layout)).tensors())
    expected = model.state_dict()
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert tensors[name].dtype == torch.bfloat16
        assert torch.equal(tensors[name], tensor)


@pytest.mark.usefixtures("no_network")
def test_a_folder_is_read_without_network(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    loader = hf(saved)
    assert loader.model_config().num_hidden_layers == 3
    tokenizer = loader.tokenizer()
    assert tokenizer is not None
    assert tokenizer.eos_token_id == 2
    assert sum(1 for _ in loader.tensors()) == 30


def test_one_file_of_another_name_is_read(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "weights.safetensors")
    assert len(dict(hf(saved).tensors())) == 30


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, [2]),
        (2, {"eos_token_id": 5}, [5, 2]),
        ([2, 3], {"eos_token_id": [4, 2]}, [4, 2, 3]),
        (None, {"eos_token_id": 5}, [5]),
        (None, {}, None),
        (2, {"temperature": 0.5}, [2]),
    ],
)
def test_eos_holds_every_id_that_ends_a_generation(
    saved: Path, config: Any, generation: dict[str, Any] | None, expected: list[int] | None
) -> None:
    content = json.loads((saved / "config.json").read_text())
    (saved / "config.json").write_text(json.dumps({**content, "eos_token_id": config}))
    (saved / "generation_config.json").unlink()
    if generation is not None:
        (saved / "generation_config.json").write_text(json.dumps(generation))
    assert hf(saved).model_config().eos_token_id == expected


def test_a_folder_without_tokenizer_has_none(sharded: Path) -> None:
    assert hf(sharded).tokenizer() is None


def test_only_safetensors_and_text_are_fetched_from_the_hub(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def snapshot_download(repo: str, *, allow_patterns: list[str]) -> str:
        calls.append((repo, allow_patterns))
        return str(saved)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    loader = hf("org/name")
    assert loader.model_config().vocab_size == 64
    assert len(dict(loader.tensors())) == 30
    ((repo, patterns),) = calls
    assert repo == "org/name"
    assert set(patterns) == {"*.safetensors", "*.json", "*.jinja", "tokenizer.model"}


def test_a_model_that_is_nowhere_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(repo: str, **_: object) -> str:
        raise LocalEntryNotFoundError("cannot reach the hub\nand more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    with pytest.raises(ValueError, match=r"org/name is not a folder here.*reach the hub$"):
        hf("org/name").model_config()


@pytest.mark.parametrize("path", ["/far/away", "./away", "a/b/c", "weights.safetensors"])
def test_a_path_that_is_no_hub_id_is_never_looked_up(path: str) -> None:
    assert not HFLoader.detect(path)
    with pytest.raises(ValueError, match="does not exist"):
        hf(path).model_config()


def test_detect_wants_readable_weights(saved: Path, tmp_path_factory) -> None:
    assert HFLoader.detect(str(saved))
    assert HFLoader.detect("org/name")
    assert HFLoader.detect("gpt2")
    assert not HFLoader.detect(str(tmp_path_factory.mktemp("empty")))
    assert not HFLoader.detect(str(saved / "config.json"))


def test_quantized_weights_are_left_to_others(saved: Path) -> None:
    content = json.loads((saved / "config.json").read_text())
    content["quantization_config"] = {"quant_method": "gptq", "bits": 4}
    (saved / "config.json").write_text(json.dumps(content))
    assert not HFLoader.detect(str(saved))
    with pytest.raises(ValueError, match=r"config\.json says .* quantized with 'gptq'"):
        hf(saved).model_config()


def test_pickled_weights_are_refused(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    torch.save({}, saved / "pytorch_model.bin")
    assert not HFLoader.detect(str(saved))
    with pytest.raises(ValueError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        next(hf(saved).tensors())


def test_code_of_the_model_runs_only_when_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", tmp_path / "cache")
    monkeypatch.syspath_prepend(tmp_path / "cache")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "configuration_odd.py").write_text(
        "from transformers import PretrainedConfig\n"
        f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
        "class OddConfig(PretrainedConfig):\n"
        "    model_type = 'odd'\n"
    )
    (folder / "config.json").write_text(
        json.dumps({"auto_map": {"AutoConfig": "configuration_odd.OddConfig"}})
    )
    with pytest.raises(
        ValueError, match=r"config\.json needs Python code.*model\.trust_remote_code"
    ):
        hf(folder).model_config()
    assert not (tmp_path / "ran").exists()
    assert hf(folder, trust_remote_code=True).model_config().model_type == "odd"
    assert (tmp_path / "ran").exists()


def break_index(folder: Path, **places: str) -> None:
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"].update(places)
    index.write_text(json.dumps(content))


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    ("place", "message"),
    [
        ("absent.safetensors", r"index\.json names the file absent\.safetensors"),
        ("../model.safetensors", "which is not a file name"),
    ],
)
def test_an_index_that_points_nowhere_is_named(sharded: Path, place: str, message: str) -> None:
    break_index(sharded, **{NORM: place})
    with pytest.raises(ValueError, match=message) as raised:
        dict(hf(sharded).tensors())
    assert repr(NORM) in str(raised.value)


def test_a_tensor_that_its_shard_lacks_is_named(sharded: Path) -> None:
    places = json.loads((sharded / "model.safetensors.index.json").read_text())["weight_map"]
    shard = sharded / places[NORM]
    tensors = load_file(shard)
    del tensors[NORM]
    save_file(tensors or {"other": torch.zeros(1)}, shard)
    with pytest.raises(ValueError, match=rf"{shard.name} has no tensor '{NORM}'"):
        dict(hf(sharded).tensors())


@pytest.mark.parametrize("length", [0, 4, 200, -5])
def test_a_cut_file_is_named(saved: Path, length: int) -> None:
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(ValueError, match=r"model\.safetensors is not a complete"):
        dict(hf(saved).tensors())


def test_several_files_without_an_index_are_not_guessed(saved: Path) -> None:
    (saved / "model.safetensors").rename(saved / "a.safetensors")
    (saved / "b.safetensors").write_bytes((saved / "a.safetensors").read_bytes())
    with pytest.raises(ValueError, match="2 safetensors files but neither"):
        dict(hf(saved).tensors())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", "{", "is not valid JSON"),
        ("config.json", "[]", "does not hold a JSON object"),
        ("config.json", "{}", "has no 'model_type'"),
        ("config.json", '{"model_type": "from-the-future"}', "cannot be used: .*from-the-future"),
        ("config.json", '{"model_type": "llama", "hidden_size": "x"}', "cannot be used"),
        ("config.json", "[" * 100_000, "is not valid JSON"),
        ("config.json", '{"model_type": ["llama"]}', "model_type .* is not text"),
        (
            "config.json",
            '{"model_type": "qwen2", "num_hidden_layers": 1000000000}',
            "at most 10000",
        ),
        ("config.json", '{"model_type": "llama", "dtype": "bogus"}', "cannot be used.*bogus"),
        ("config.json", '{"model_type": "llama", "dtype": 7}', "has dtype 7"),
        ("config.json", '{"model_type": "llama", "dtype": "int8"}', "has dtype torch.int8"),
        ("config.json", '{"model_type": "llama", "eos_token_id": "x"}', "eos_token_id"),
        ("generation_config.json", "{", "is not valid JSON"),
        ("generation_config.json", "[]", "does not hold a JSON object"),
        ("generation_config.json", '{"eos_token_id": "x"}', "eos_token_id 'x'"),
        ("generation_config.json", '{"eos_token_id": [1, "x"]}', "must be a token id or a list"),
        ("generation_config.json", '{"eos_token_id": {"a": 1}}', "must be a token id or a list"),
        ("generation_config.json", '{"eos_token_id": 1.5}', "must be a token id or a list"),
        ("generation_config.json", '{"eos_token_id": true}', "must be a token id or a list"),
    ],
)
def test_a_broken_configuration_is_named(
    saved: Path, name: str, content: str, message: str
) -> None:
    (saved / name).write_text(content)
    with pytest.raises(ValueError, match=f"(?s){saved / name}.*{message}"):
        hf(saved).model_config()


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_a_configuration_that_is_no_text_is_named(saved: Path, name: str) -> None:
    (saved / name).write_bytes(b'{"model_type": "\xff\xfe"}')
    with pytest.raises(ValueError, match=f"{saved / name} is not valid JSON"):
        hf(saved).model_config()


def test_a_folder_in_the_place_of_the_weights_is_named(saved: Path) -> None:
    (saved / "model.safetensors").unlink()
    (saved / "model.safetensors").mkdir()
    assert not HFLoader.detect(str(saved))
    with pytest.raises(
        ValueError, match=r"no safetensors files \(model\.safetensors is not a file"
    ):
        dict(hf(saved).tensors())


def test_a_missing_configuration_is_named(saved: Path) -> None:
    (saved / "config.json").unlink()
    with pytest.raises(ValueError, match=r"has no config\.json"):
        hf(saved).model_config()


def test_a_broken_tokenizer_is_named(saved: Path) -> None:
    (saved / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=f"tokenizer in {saved} cannot be loaded"):
        hf(saved).tokenizer()
