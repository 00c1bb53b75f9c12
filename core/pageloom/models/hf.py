"""The Hugging Face weight loader: safetensors, from a folder or the hub."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageloom.contract import Slice, WeightLoader
from pageloom.contract.checkpoint import Checkpoint, has_weights, quantization
from pageloom.contract.kv_scales import is_kv_scale, read_kv_scales
from pageloom.contract.pretrained import CONFIG_FILE, is_hub_id

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom.contract.quantizer import Kind


class HFLoader(WeightLoader):
    """Reads a `Checkpoint` whose weights are not quantized; tensors keep the dtype they are stored
    in."""

    @dataclass
    class Config:
        trust_remote_code: bool = False
        """Run Python code that comes with the model, for its configuration and tokenizer."""

    def __init__(self, config: Any, path: str) -> None:
        super().__init__(config, path)
        self._checkpoint = Checkpoint(path, config.trust_remote_code)

    @classmethod
    def detect(cls, path: str) -> bool:
        folder = Path(path)
        if not folder.is_dir():
            return is_hub_id(path)
        return has_weights(folder) and quantization(folder) is None

    def model_config(self) -> PretrainedConfig:
        folder = self._checkpoint.folder
        method = quantization(folder)
        if method is not None:
            raise ValueError(
                f"{folder / CONFIG_FILE} says the weights are quantized with {method!r}, "
                "which the loader 'hf' does not read"
            )
        return self._checkpoint.config()

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self._checkpoint.tokenizer()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors_of({})

    def tensors_of(self, parts: Mapping[str, Slice | None]) -> Iterator[tuple[str, torch.Tensor]]:
        weights = (name for name in self._checkpoint.files if not is_kv_scale(name))
        return self._checkpoint.tensors_of(weights, parts)

    def kv_scales(self) -> Mapping[tuple[int, Kind], float]:
        return read_kv_scales(self._checkpoint)
