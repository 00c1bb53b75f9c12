"""The right loader is found for a path, or the reason why there is none is told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pageloom.config.errors import ConfigError
from pageloom.contract import WeightLoader
from pageloom.errors import PageloomError
from pageloom.models.dummy import DummyLoader
from pageloom.models.hf import HFLoader
from pageloom.models.loading import open_loader
from pageloom.plugins import PluginError, Plugins


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load()


class Greedy(WeightLoader):
    """Claims every path."""

    @classmethod
    def detect(cls, path: str) -> bool:
        return True

    def model_config(self) -> Any:
        raise NotImplementedError

    def tokenizer(self) -> None:
        return None

    def tensors(self) -> Any:
        yield from ()


class Broken(Greedy):
    """Fails when it is asked."""

    @classmethod
    def detect(cls, path: str) -> bool:
        raise KeyError("odd")


class BrokenLoaders:
    """A registry in which one loader fails when asked and another cannot be imported."""

    def names(self, kind: str) -> list[str]:
        return ["absent", "broken", "hf"]

    def get(self, kind: str, name: str) -> type:
        if name == "absent":
            raise PluginError("weight loader 'absent' cannot be imported: no module")
        return {"broken": Broken, "hf": HFLoader}[name]


class TwoLoaders:
    """A registry where two loaders claim the same folders."""

    def names(self, kind: str) -> list[str]:
        return ["greedy", "hf"]

    def get(self, kind: str, name: str) -> type:
        return {"greedy": Greedy, "hf": HFLoader}[name]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def test_a_folder_with_safetensors_is_for_hf(plugins: Plugins, folder: Path) -> None:
    (folder / "model.safetensors").touch()
    loader = open_loader(plugins, str(folder))
    assert isinstance(loader, HFLoader)
    assert loader.path == str(folder)


def test_a_hub_id_is_for_hf(plugins: Plugins) -> None:
    assert isinstance(open_loader(plugins, "org/some-model_1.5B"), HFLoader)


def test_a_gguf_file_is_for_gguf(plugins: Plugins, folder: Path) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF")
    loader = open_loader(plugins, str(folder / "model.gguf"))
    assert type(loader).__name__ == "GGUFLoader"


def test_a_named_loader_is_not_asked(plugins: Plugins, folder: Path) -> None:
    (folder / "model.safetensors").touch()
    loader = open_loader(plugins, str(folder), "dummy", {"seed": 7})
    assert isinstance(loader, DummyLoader)
    assert loader.config.seed == 7


def test_options_are_checked_against_the_loader(plugins: Plugins) -> None:
    with pytest.raises(ConfigError, match="sed"):
        open_loader(plugins, "org/name", "dummy", {"sed": 7})
    with pytest.raises(ConfigError, match="initializer_range must be 0 or more"):
        open_loader(plugins, "org/name", "dummy", {"initializer_range": -1.0})


def test_trust_reaches_the_loaders_that_can_use_it(plugins: Plugins, folder: Path) -> None:
    assert open_loader(plugins, "org/name", trust_remote_code=True).config.trust_remote_code
    assert not open_loader(plugins, "org/name").config.trust_remote_code
    open_loader(plugins, str(folder / "a.gguf"), "gguf", trust_remote_code=True)


def test_an_unknown_loader_is_refused(plugins: Plugins) -> None:
    with pytest.raises(PageloomError, match="hff"):
        open_loader(plugins, "org/name", "hff")


def test_loaders_that_fail_do_not_hide_the_one_that_knows_the_path(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    assert isinstance(open_loader(BrokenLoaders(), str(folder)), HFLoader)


def test_loaders_that_fail_are_told_when_no_other_knows_the_path(folder: Path) -> None:
    with pytest.raises(PageloomError) as raised:
        open_loader(BrokenLoaders(), str(folder))
    told = str(raised.value)
    assert "has no safetensors files" in told
    assert "'absent' cannot be imported: no module" in told
    assert "loader 'broken' could not tell: KeyError: 'odd'" in told


@pytest.mark.parametrize("config", [b"{", b"[]", b'{"a": "\xff"}', b"[" * 100_000])
def test_a_broken_configuration_is_named_with_its_cause(
    plugins: Plugins, folder: Path, config: bytes
) -> None:
    (folder / "model.safetensors").touch()
    (folder / "config.json").write_bytes(config)
    with pytest.raises(PageloomError, match=rf"{folder / 'config.json'} (is not|does not hold)"):
        open_loader(plugins, str(folder))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/dev/null", "is neither a file nor a folder"),
        ("x/" * 3 + "y" * 5000, "cannot be read: OSError: .*too long"),
        ("a\0b/c/d", "does not exist"),
    ],
)
def test_a_path_that_is_no_model_is_told(plugins: Plugins, path: str, message: str) -> None:
    with pytest.raises(PageloomError, match=message):
        open_loader(plugins, path)


def test_several_loaders_ask_for_a_choice(folder: Path) -> None:
    (folder / "model.safetensors").touch()
    with pytest.raises(PageloomError, match=r"set model\.loader to one of greedy, hf"):
        open_loader(TwoLoaders(), str(folder))


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        ({}, "absent/far/away", "does not exist, and is not written like a hub id"),
        ({}, "absent.gguf", "does not exist"),
        ({}, ".", "has no safetensors files"),
        ({"pytorch_model.bin": ""}, ".", r"only pickled weights \(pytorch_model.bin\)"),
        ({"pytorch_model.bin": ""}, "pytorch_model.bin", "is pickled weights"),
        ({"model.safetensors": ""}, "model.safetensors", "give the folder"),
        ({"notes.txt": ""}, "notes.txt", "no format that a loader knows"),
        ({"tiny.gguf": "GGUF"}, ".", "such as tiny.gguf"),
        (
            {
                "model.safetensors": "",
                "config.json": json.dumps({"quantization_config": {"quant_method": "gptq"}}),
            },
            ".",
            "quantized with 'gptq', which no loader here reads",
        ),
        (
            {
                "model.safetensors": "",
                "config.json": json.dumps({"quantization_config": {"quant_method": ""}}),
            },
            ".",
            "quantized with '', which no loader here reads",
        ),
    ],
)
def test_no_loader_tells_the_nearest_cause(
    plugins: Plugins, tmp_path: Path, files: dict[str, str], path: str, message: str
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(PageloomError, match=message) as raised:
        open_loader(plugins, str(tmp_path / path))
    assert "asked the loaders awq, compressed_tensors, dummy, gguf, hf" in str(raised.value)
