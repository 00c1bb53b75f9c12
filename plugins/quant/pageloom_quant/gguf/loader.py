"""The GGUF weight loader."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from pageloom.contract import WeightLoader

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom_quant.gguf.architectures import Slot
    from pageloom_quant.gguf.reader import GGUFFile


class GGUFLoader(WeightLoader):
    """Reads one ``.gguf`` file as llama.cpp writes it: weights, configuration and tokenizer.

    Quantized tensors are unpacked to float32, others keep their dtype; the engine casts them to
    the dtype it runs in. Which architectures can be loaded is in `ARCHITECTURES`.
    """

    @dataclass
    class Config:
        pre_tokenizer: str | None = None
        """Split text as this ``tokenizer.ggml.pre`` says, for files that do not or are wrong."""

    @classmethod
    def detect(cls, path: str) -> bool:
        file = Path(path)
        if not file.is_file():
            return False
        with file.open("rb") as data:
            return data.read(4) == b"GGUF" or file.suffix == ".gguf"

    def model_config(self) -> PretrainedConfig:
        from pageloom_quant.gguf.config import model_config

        return model_config(self._file)

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        from pageloom_quant.gguf.tokenizer import build_tokenizer

        return build_tokenizer(self._file, self.config.pre_tokenizer)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        from pageloom_quant.gguf.architectures import (
            check_tensors,
            find_architecture,
            tensor_slots,
        )

        slots = list(tensor_slots(self._file, find_architecture(self._file)))
        check_tensors(self._file, slots)
        for slot in slots:
            yield slot.name, self._read(slot)

    @cached_property
    def _file(self) -> GGUFFile:
        from pageloom_quant.gguf.reader import GGUFFile

        return GGUFFile(self.path)

    def _read(self, slot: Slot) -> torch.Tensor:
        """One tensor as Hugging Face has it."""
        from pageloom_quant.gguf.dequantize import dequantize

        rows = self._file.rows(slot.source)
        if slot.heads:
            # Rows are whole blocks, so their order is restored on the packed bytes. llama.cpp puts
            # the two halves of a rotary pair next to each other, Hugging Face half a head apart.
            rows = rows.view(slot.shape[0], -1)
            pairs = rows.view(slot.heads, -1, 2, rows.shape[1])
            rows = pairs.transpose(1, 2).reshape(rows.shape)
        kind = self._file.tensors[slot.source].type
        try:
            tensor = dequantize(rows, kind).reshape(slot.shape)
        except NotImplementedError:
            raise self._file.error(
                f"has type {kind.name} in tensor {slot.source!r}, which cannot be unpacked"
            ) from None
        return tensor - 1 if slot.norm_offset else tensor
