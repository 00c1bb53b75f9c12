"""What loaders of safetensors with packed linear layers have in common."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pageloom.contract import WeightLoader
from pageloom.contract.checkpoint import Checkpoint, has_weights, quantization
from pageloom.contract.kv_scales import is_kv_scale, read_kv_scales

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom.contract.quantizer import Kind
    from pageloom_quant.packed import PackedWeight

log = logging.getLogger(__name__)

SCALE_DTYPES = ("float16", "bfloat16", "float32")


class PackedCheckpointLoader(WeightLoader):
    """Reads a `Checkpoint` some of whose linear layers are stored as 4-bit codes in groups.

    Which layers those are is seen from their tensors. Where a model asks for a layer, or for
    several merged into one, the codes stay packed; of those that it does not ask for, `tensors`
    yields the weight, expanded to float32.
    """

    METHOD: ClassVar[str]
    """``quant_method`` in the ``quantization_config`` of ``config.json``."""
    PARTS: ClassVar[Sequence[str]]
    """The tensors of a packed layer, after its name; the codes come first."""

    @dataclass
    class Config:
        trust_remote_code: bool = False
        """Run Python code that comes with the model, for its configuration and tokenizer."""

    def __init__(self, config: Any, path: str) -> None:
        super().__init__(config, path)
        self.checkpoint = Checkpoint(path, config.trust_remote_code)
        self._supplied: set[str] = set()
        self._supplied_biases: set[str] = set()

    @classmethod
    def detect(cls, path: str) -> bool:
        folder = Path(path)
        return folder.is_dir() and has_weights(folder) and quantization(folder) == cls.METHOD

    def model_config(self) -> PretrainedConfig:
        method = self.checkpoint.quantization().get("quant_method")
        if method != self.METHOD:
            raise self.config_error(
                f"quant_method {method!r}, but this loader reads {self.METHOD!r}"
            )
        self.read_settings()
        return self.checkpoint.config()

    def tokenizer(self) -> PreTrainedTokenizerBase | None:
        return self.checkpoint.tokenizer()

    def linear(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.nn.Module | None:
        import torch

        from pageloom_quant.packed import PackedWeight, packed_linear

        sizes = dict(zip(names, out_features, strict=True))
        weights = [
            self._sized_weight(name, in_features, sizes[name])
            for name in names
            if name in self._layers
        ]
        if not weights:
            return None
        if len(weights) < len(names) or len({weight.group_size for weight in weights}) > 1:
            log.warning(
                "%s are computed as one but not stored alike: they are expanded", ", ".join(names)
            )
            return None
        biases = [self._bias(name, sizes[name]) for name in names] if bias else []
        self._supplied.update(names)
        added = torch.cat(biases) if bias else None
        return packed_linear(PackedWeight.cat(weights), added, dtype, device)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        for name in self.checkpoint.files:
            layer, _, part = name.rpartition(".")
            packed = layer in self._layers and part in self.PARTS
            if not (packed or name in self._supplied_biases or is_kv_scale(name)):
                yield name, self.checkpoint.tensor(name)
        for layer in sorted(self._layers - self._supplied):
            yield f"{layer}.weight", self.packed_weight(layer).dequantize(torch.float32)

    def kv_scales(self) -> Mapping[tuple[int, Kind], float]:
        return read_kv_scales(self.checkpoint)

    @abstractmethod
    def read_settings(self) -> None:
        """Read `Checkpoint.quantization`. Raises what `config_error` makes for whatever is in it
        that this loader does not read."""

    @abstractmethod
    def packed_weight(self, layer: str) -> PackedWeight:
        """The weight of a packed layer. Raises `ValueError` that names file and tensor."""

    def part(
        self, layer: str, part: str, dtypes: Sequence[str], shape: Sequence[int | None]
    ) -> torch.Tensor:
        """A tensor of ``layer``, of one of these dtypes and of this shape, in which None is any
        size from 1. Raises `ValueError` that names file and tensor."""
        name = f"{layer}.{part}"
        if name not in self.checkpoint.files:
            there = next(
                other for p in self.PARTS if (other := f"{layer}.{p}") in self.checkpoint.files
            )
            raise self.tensor_error(there, f"but no {name!r}, without which it cannot be unpacked")
        tensor = self.checkpoint.tensor(name)
        fits = len(tensor.shape) == len(shape) and all(
            found == size if size is not None else found > 0
            for found, size in zip(tensor.shape, shape, strict=True)
        )
        if not fits or str(tensor.dtype).removeprefix("torch.") not in dtypes:
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.tensor_error(name, f"but it must be {' or '.join(dtypes)} [{sizes}]")
        return tensor

    def scales(self, layer: str, part: str, shape: Sequence[int]) -> torch.Tensor:
        """The `part` that holds scales, all of which are finite."""
        scales = self.part(layer, part, SCALE_DTYPES, shape)
        if not bool(scales.isfinite().all()):
            raise self.tensor_error(f"{layer}.{part}", "but not all of its scales are finite")
        return scales

    def group_size(self, layer: str, in_features: int, wanted: int) -> int:
        """``wanted`` inputs per group, or all of them if it is -1. Raises `ValueError` if the
        inputs of ``layer`` cannot be cut into such groups."""
        size = in_features if wanted == -1 else wanted
        if in_features % size or in_features % 2:
            raise self.tensor_error(
                f"{layer}.{self.PARTS[0]}",
                f"but its {in_features} inputs cannot be cut into even groups of {size}",
            )
        return size

    @cached_property
    def _layers(self) -> frozenset[str]:
        """The layers of which any part is stored."""
        split = (name.rpartition(".") for name in self.checkpoint.files)
        return frozenset(layer for layer, _, part in split if part in self.PARTS)

    def _sized_weight(self, layer: str, in_features: int, out_features: int) -> PackedWeight:
        weight = self.packed_weight(layer)
        if (weight.in_features, weight.out_features) != (in_features, out_features):
            raise self.tensor_error(
                f"{layer}.{self.PARTS[0]}",
                f"a layer from {weight.in_features} to {weight.out_features}, but the "
                f"configuration says from {in_features} to {out_features}",
            )
        return weight

    def _bias(self, layer: str, size: int) -> torch.Tensor:
        self._supplied_biases.add(f"{layer}.bias")
        return self.part(layer, "bias", SCALE_DTYPES, [size])

    def tensor_error(self, name: str, problem: str) -> ValueError:
        tensor = self.checkpoint.tensor(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ValueError(
            f"{self.checkpoint.files[name]} has tensor {name!r} as {dtype} {list(tensor.shape)}, "
            f"{problem}"
        )

    def config_error(self, problem: str) -> ValueError:
        return ValueError(f"{self.checkpoint.folder / 'config.json'} has {problem}")
