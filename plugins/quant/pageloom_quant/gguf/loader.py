"""The GGUF weight loader."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pageloom.contract import Slice, WeightLoader

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom_quant.gguf.architectures import Slot
    from pageloom_quant.gguf.reader import GGUFFile
    from pageloom_quant.packed import PackedWeight

log = logging.getLogger(__name__)

HEAD, EMBEDDING = "lm_head", "model.embed_tokens"
LISTED = 5  # files of a folder, in a message


class GGUFLoader(WeightLoader):
    """Reads one ``.gguf`` file as llama.cpp writes it: weights, configuration and tokenizer.

    Linear layers that the model asks for (`linear`) stay packed where all that is merged into one
    is Q4_0 or Q4_1, or all Q8_0; so does the output layer that is the embedding matrix, which as a
    table is expanded. Other quantized tensors are unpacked to float32, others keep their dtype;
    the engine casts them to the dtype it runs in. Which architectures can be loaded is in
    `ARCHITECTURES`.
    """

    @dataclass
    class Config:
        pre_tokenizer: str | None = None
        """Split text as this ``tokenizer.ggml.pre`` says, for files that do not or are wrong."""
        dequantize: bool | None = None
        """Expand all weights to the model's dtype. By default where packed ones would be slow:
        without native code for the device."""

    supports_parts = True

    def __init__(self, config: Any, path: str) -> None:
        super().__init__(config, path)
        self._supplied: set[str] = set()  # tensors, by the names of Hugging Face
        self._expanded: set[str] = set()  # types of layers that could not stay packed
        self._told = False  # why nothing stays packed

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

    def linear(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        parts: Sequence[Slice] | None = None,
    ) -> torch.nn.Module | None:
        import torch

        from pageloom_quant.gguf.blocks import BITS
        from pageloom_quant.gguf.dequantize import PLAIN
        from pageloom_quant.packed import PackedWeight, packed_linear

        if not self._packs(dtype, device):
            return None
        slots = [self._slots[f"{self._source_of(name)}.weight"] for name in names]
        kinds = [self._file.tensors[slot.source].type for slot in slots]
        if len({BITS.get(kind) for kind in kinds}) > 1 or kinds[0] not in BITS:
            self._expanded.update(kind.name for kind in kinds if kind not in PLAIN)
            return None
        cuts: Sequence[Slice | None] = parts or [None] * len(names)
        weights = [self._packed(slot, cut) for slot, cut in zip(slots, cuts, strict=True)]
        added = None
        if bias:
            own = [cut if cut is not None and cut.dim == 0 else None for cut in cuts]
            biases = zip(names, own, strict=True)
            added = torch.cat([self._read(self._slots[f"{n}.bias"], cut) for n, cut in biases])
        for name in names:
            self._supplied |= {f"{name}.weight", f"{name}.bias"}
        return packed_linear(PackedWeight.cat(weights), added, dtype, device)

    def input_unit(self, name: str) -> int:
        from gguf import GGML_QUANT_SIZES

        from pageloom_quant.gguf.blocks import BITS

        kind = self._file.tensors[self._slots[f"{name}.weight"].source].type
        return GGML_QUANT_SIZES[kind][0] if kind in BITS else 1

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors_of({})

    def tensors_of(self, parts: Mapping[str, Slice | None]) -> Iterator[tuple[str, torch.Tensor]]:
        if self._expanded:
            log.warning(
                "%s: linear layers of types %s are expanded; those that are all Q4_0 or Q4_1, or "
                "all Q8_0, stay packed",
                self.path,
                ", ".join(sorted(self._expanded)),
            )
        for name, slot in self._slots.items():
            if name not in self._supplied and (name not in parts or parts[name] is not None):
                yield name, self._read(slot, parts.get(name))

    @cached_property
    def _file(self) -> GGUFFile:
        from pageloom_quant.gguf.reader import GGUFFile

        if not (path := Path(self.path)).is_file():
            raise ValueError(f"{path} {_why_no_file(path)}")
        return GGUFFile(path)

    @cached_property
    def _slots(self) -> dict[str, Slot]:
        """Every tensor of the model, by the name that Hugging Face has for it."""
        from pageloom_quant.gguf.architectures import (
            check_tensors,
            find_architecture,
            tensor_slots,
        )

        slots = list(tensor_slots(self._file, find_architecture(self._file)))
        check_tensors(self._file, slots)
        return {slot.name: slot for slot in slots}

    def _packs(self, dtype: torch.dtype, device: torch.device) -> bool:
        from pageloom_quant.packed import why_not_native

        if self.config.dequantize is not None:
            return not self.config.dequantize
        reason = why_not_native(dtype, device)
        if reason and not self._told:
            self._told = True
            name = str(dtype).removeprefix("torch.")
            log.warning("%s: all weights are expanded to %s: %s", self.path, name, reason)
        return reason is None

    def _source_of(self, layer: str) -> str:
        """The layer whose weight computes ``layer``: a file without an output layer has it in the
        embedding."""
        tied = layer == HEAD and f"{HEAD}.weight" not in self._slots
        return EMBEDDING if tied else layer

    def _rows(self, slot: Slot, part: Slice | None = None) -> torch.Tensor:
        """The bytes of a tensor, or of the outputs of it that are the ``part``, ``uint8 [rows,
        bytes per row]``, rows as Hugging Face has them."""
        import torch

        rows, by_rows = self._file.rows(slot.source), part is not None and part.dim == 0
        if not (slot.heads or by_rows):
            return rows
        rows = rows.view(slot.shape[0], -1)
        own = slice(part.start, part.stop) if part is not None and by_rows else slice(None)
        if not slot.heads:
            return rows[own]
        # Rows are whole blocks, so their order is restored on the packed bytes. llama.cpp puts the
        # two halves of a rotary pair next to each other, Hugging Face half a head apart.
        order = torch.arange(len(rows)).view(slot.heads, -1, 2).transpose(1, 2).flatten()
        return rows[order[own]]

    def _around(self, slot: Slot, part: Slice | None) -> tuple[torch.Tensor, int]:
        """`_rows`, of the blocks alone that hold the inputs that are the ``part``, and the element
        of those that it begins at."""
        from gguf import GGML_QUANT_SIZES

        if part is not None:
            part.check(slot.name, slot.shape)
        rows = self._rows(slot, part)
        if part is None or part.dim == 0:
            return rows, 0
        block, size = GGML_QUANT_SIZES[self._file.tensors[slot.source].type]
        first, start = divmod(part.start, block)
        return rows[:, first * size : -(-part.stop // block) * size].contiguous(), start

    def _packed(self, slot: Slot, part: Slice | None) -> PackedWeight:
        """One matrix of a type in `BITS`, or a part of it, as it is."""
        from pageloom_quant.gguf.blocks import packed_weight

        rows, start = self._around(slot, part)
        weight = packed_weight(rows, self._file.tensors[slot.source].type)
        if part is not None and part.dim == 1 and (start or part.stop % weight.group_size):
            raise self._file.error(
                f"has blocks of {weight.group_size} inputs in tensor {slot.source!r}, which would "
                f"be cut at {part.start} and {part.stop}; set parallel.tensor_parallel_size so "
                "that they are not, or model.options.dequantize to true"
            )
        self._require_finite(slot, weight.scales, weight.minimums)
        return weight

    def _read(self, slot: Slot, part: Slice | None = None) -> torch.Tensor:
        """One tensor, or a part of it, as Hugging Face has it."""
        from pageloom_quant.gguf.dequantize import PLAIN, read_rows

        rows, start = self._around(slot, part)
        tensor = read_rows(self._file, slot.source, rows)
        if part is None:
            tensor = tensor.reshape(slot.shape)
        elif part.dim == 0:
            tensor = tensor.reshape(-1, *slot.shape[1:])
        else:
            tensor = tensor.narrow(1, start, part.stop - part.start)
        if self._file.tensors[slot.source].type not in PLAIN:
            self._require_finite(slot, tensor)
        return tensor - 1 if slot.norm_offset else tensor

    def _require_finite(self, slot: Slot, *numbers: torch.Tensor) -> None:
        """Raise `ValueError` if the scales of ``slot``, or what they made, are not finite."""
        if not all(bool(bound.isfinite()) for n in numbers for bound in n.aminmax()):
            kind = self._file.tensors[slot.source].type
            raise self._file.error(
                f"has scales in the {kind.name} blocks of tensor {slot.source!r} that are not "
                "finite: it is damaged"
            )


def _why_no_file(path: Path) -> str:
    """What stands where a GGUF file should, and what to give instead."""
    if not path.is_dir():
        what = "is not a file" if path.exists() else "does not exist"
        return f"{what}; model.path must name a .gguf file for the loader 'gguf'"
    files = sorted(file.name for file in path.glob("*.gguf") if file.is_file())
    if not files:
        return (
            "is a folder without .gguf files, and the loader 'gguf' reads one such file; name one "
            "as model.path, or set model.loader to auto"
        )
    more = f" and {len(files) - LISTED} more" if len(files) > LISTED else ""
    return (
        "is a folder, and the loader 'gguf' reads one file; name one of those in it as model.path: "
        f"{', '.join(files[:LISTED])}{more}"
    )
