"""The Hugging Face weight loader: safetensors, from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pageloom.contract import WeightLoader
from pageloom.models.pretrained import (
    CONFIG_FILE,
    HUB_PATTERNS,
    find_folder,
    is_hub_id,
    read_config,
    read_json,
    read_tokenizer,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")


class HFLoader(WeightLoader):
    """Reads a model that `transformers` saved: ``config.json``, a tokenizer, and safetensors.

    ``path`` is a folder, which is read without network, or a hub id. Tensors keep the dtype they
    are stored in. Pickled weights are refused: unpickling a file runs what it says.
    """

    @dataclass
    class Config:
        trust_remote_code: bool = False
        """Run Python code that comes with the model, for its configuration and tokenizer."""

    @classmethod
    def detect(cls, path: str) -> bool:
        folder = Path(path)
        if not folder.is_dir():
            return is_hub_id(path)
        if not weight_files(folder) and not (folder / INDEX_FILE).is_file():
            return False
        return quantization(folder) is None

    def model_config(self) -> PretrainedConfig:
        method = quantization(self._folder)
        if method is not None:
            raise ValueError(
                f"{self._folder / CONFIG_FILE} says the weights are quantized with {method!r}, "
                "which the loader 'hf' does not read"
            )
        return read_config(self._folder / CONFIG_FILE, self.config.trust_remote_code)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return read_tokenizer(self._folder, self.config.trust_remote_code)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        for file, names in self._shards().items():
            yield from _read_file(file, names)

    @cached_property
    def _folder(self) -> Path:
        return find_folder(self.path, ("*.safetensors", *HUB_PATTERNS))

    def _shards(self) -> dict[Path, list[str] | None]:
        """The weight files, each with the tensors to take from it; None takes all."""
        index = self._folder / INDEX_FILE
        if index.is_file():
            return _indexed(index)
        single = self._folder / SINGLE_FILE
        if single.is_file():
            return {single: None}
        files = weight_files(self._folder)
        if len(files) == 1:
            return {files[0]: None}
        if files:
            raise ValueError(
                f"{self._folder} has {len(files)} safetensors files but neither {SINGLE_FILE} nor "
                f"{INDEX_FILE}, so it cannot be known which to read"
            )
        raise ValueError(f"{self._folder} {why_no_weights(self._folder)}")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files in ``folder``, by name."""
    return sorted(file for file in folder.glob("*.safetensors") if file.is_file())


def quantization(folder: Path) -> str | None:
    """How ``config.json`` says the weights are quantized, None if it does not say so."""
    if not (folder / CONFIG_FILE).is_file():
        return None
    section = read_json(folder / CONFIG_FILE).get("quantization_config")
    if not section:
        return None
    return str(section.get("quant_method", "?")) if isinstance(section, dict) else "?"


def why_no_weights(folder: Path) -> str:
    """What a folder without safetensors has instead, as the end of a sentence about it."""
    pickled = sorted(file.name for file in folder.iterdir() if file.suffix in PICKLE_SUFFIXES)
    if pickled:
        return (
            f"has only pickled weights ({pickled[0]}), which could run code when read; convert "
            "them to safetensors, as save_pretrained does"
        )
    if others := sorted(path.name for path in folder.glob("*.safetensors")):
        return f"has no safetensors files ({others[0]} is not a file)"
    return "has no safetensors files"


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ValueError(f"{index} has no 'weight_map'")
    shards: dict[Path, list[str]] = {}
    for name, file in places.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise ValueError(f"{index} has {file!r} for tensor {name!r}, which is not a file name")
        shards.setdefault(index.with_name(file), []).append(name)
    for path, names in shards.items():
        if not path.is_file():
            raise ValueError(
                f"{index} names the file {path.name} for tensor {names[0]!r}, which is missing"
            )
    return dict(shards)


def _read_file(file: Path, names: list[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as data:
            present = set(data.keys())
            for name in names if names is not None else data.keys():
                if name not in present:
                    raise ValueError(f"{file} has no tensor {name!r}, which its index says it has")
                yield name, data.get_tensor(name)
    except SafetensorError as error:
        raise ValueError(f"{file} is not a complete safetensors file: {error}") from error
