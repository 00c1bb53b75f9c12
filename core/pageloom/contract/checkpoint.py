"""Checkpoints of safetensors: which file holds which tensor, and what stands there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageloom.contract.pretrained import (
    CONFIG_FILE,
    HUB_PATTERNS,
    find_folder,
    read_config,
    read_json,
    read_tokenizer,
)

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom.contract.loader import Slice

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth")
QUANTIZATION_KEY = "quantization_config"


class Checkpoint:
    """A model as `transformers` saves it: ``config.json``, a tokenizer, and safetensors.

    ``path`` is a folder, which is read without network, or a hub id. Nothing is read before it is
    asked for. Files that are missing, damaged or contradict each other are `ValueError`, or
    `OSError` for what cannot be read, that names the file. Pickled weights are refused: unpickling
    a file runs what it says; and Python code that comes with the model runs only if
    ``trust_remote_code``.
    """

    def __init__(self, path: str, trust_remote_code: bool = False) -> None:
        self.path = path
        self._trust_remote_code = trust_remote_code
        self._open: dict[Path, Any] = {}

    @cached_property
    def folder(self) -> Path:
        return find_folder(self.path, ("*.safetensors", *HUB_PATTERNS))

    @cached_property
    def files(self) -> Mapping[str, Path]:
        """The file of each tensor, file by file."""
        index = self.folder / INDEX_FILE
        if index.is_file():
            return _indexed(index)
        file = self._single_file()
        return dict.fromkeys(self._opened(file).keys(), file)

    def config(self) -> PretrainedConfig:
        """The configuration, without what it says of how weights are stored: that is for loaders.

        ``eos_token_id`` holds every id that ends a generation.
        """
        config = read_config(self.folder / CONFIG_FILE, self._trust_remote_code)
        if hasattr(config, QUANTIZATION_KEY):
            del config.quantization_config
        return config

    def quantization(self) -> dict[str, Any]:
        """What ``config.json`` says of how the weights are quantized; empty if it does not."""
        return _quantization_section(self.folder) or {}

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return read_tokenizer(self.folder, self._trust_remote_code)

    def tensor(self, name: str, part: Slice | None = None) -> torch.Tensor:
        """The tensor ``name`` of `files`, or the ``part`` of it, as it is stored: a view of the
        file, of which nothing is read before it is used, on the CPU.

        Raises `ValueError` that names the tensor if it is not what ``part`` divides.
        """
        from safetensors import SafetensorError

        file = self.files[name]
        data = self._opened(file)
        try:
            if name not in data.keys():  # noqa: SIM118 (safe_open is no mapping)
                raise ValueError(f"{file} has no tensor {name!r}, which its index says it has")
            if part is None:
                tensor: torch.Tensor = data.get_tensor(name)
                return tensor
            stored = data.get_slice(name)
            part.check(name, stored.get_shape())
            before = [slice(None)] * part.dim
            sliced: torch.Tensor = stored[(*before, slice(part.start, part.stop))]
            return sliced
        except SafetensorError as error:
            raise _incomplete(file, error) from error

    def tensors_of(
        self, names: Iterable[str], parts: Mapping[str, Slice | None]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Those of the tensors ``names`` that ``parts`` asks for, as `WeightLoader.tensors_of`."""
        for name in names:
            if name not in parts:
                yield name, self.tensor(name)
            elif (part := parts[name]) is not None:
                yield name, self.tensor(name, part)

    def _single_file(self) -> Path:
        folder = self.folder
        single = folder / SINGLE_FILE
        if single.is_file():
            return single
        files = weight_files(folder)
        if len(files) == 1:
            return files[0]
        if files:
            raise ValueError(
                f"{folder} has {len(files)} safetensors files but neither {SINGLE_FILE} nor "
                f"{INDEX_FILE}, so it cannot be known which to read"
            )
        raise ValueError(f"{folder} {why_no_weights(folder)}")

    def _opened(self, file: Path) -> Any:
        from safetensors import SafetensorError, safe_open

        if file not in self._open:
            try:
                # Maps the file and reads its header, in which every offset is checked.
                self._open[file] = safe_open(file, framework="pt")
            except SafetensorError as error:
                raise _incomplete(file, error) from error
        return self._open[file]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files in ``folder``, by name."""
    return sorted(file for file in folder.glob("*.safetensors") if file.is_file())


def has_weights(folder: Path) -> bool:
    """Whether ``folder`` holds safetensors, or the index of some."""
    return bool(weight_files(folder)) or (folder / INDEX_FILE).is_file()


def quantization(folder: Path) -> str | None:
    """How ``config.json`` says the weights are quantized, None if it does not say so."""
    section = _quantization_section(folder)
    if section is None or _is_of_kv_cache_only(section):
        return None
    return str(section.get("quant_method", "?"))


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


def _quantization_section(folder: Path) -> dict[str, Any] | None:
    if not (folder / CONFIG_FILE).is_file():
        return None
    section = read_json(folder / CONFIG_FILE).get(QUANTIZATION_KEY)
    if not section:
        return None
    return section if isinstance(section, dict) else {}


def _is_of_kv_cache_only(section: Mapping[str, Any]) -> bool:
    """Whether compressed-tensors or modelopt quantized how the KV cache is stored, and no weights.

    Such a checkpoint has plain weights, and scales that `pageloom.contract.kv_scales` finds.
    """
    groups = section.get("config_groups") or {}
    return (
        bool(section.get("kv_cache_scheme"))
        and section.get("quant_algo") is None
        and isinstance(groups, dict)
        and all(isinstance(g, dict) and g.get("weights") is None for g in groups.values())
    )


def _indexed(index: Path) -> dict[str, Path]:
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
    return {name: path for path, names in shards.items() for name in names}


def _incomplete(file: Path, error: Exception) -> ValueError:
    return ValueError(f"{file} is not a complete safetensors file: {error}")
