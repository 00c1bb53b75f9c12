"""What loaders of safetensors with packed linear layers have in common."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from pageloom.contract import Slice, WeightLoader
from pageloom.contract.checkpoint import Checkpoint, has_weights, quantization
from pageloom.contract.kv_scales import is_kv_scale, read_kv_scales

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

    from pageloom.contract.quantizer import Kind
    from pageloom_quant.packed import PackedWeight

log = logging.getLogger(__name__)

WORD = 8  # codes in a number
SCALE_DTYPES = ("float16", "bfloat16", "float32")


class Layout(NamedTuple):
    """Of a packed layer."""

    outputs: int
    inputs: int
    group_size: int  # inputs that share a scale


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
    supports_parts = True

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
        parts: Sequence[Slice] | None = None,
    ) -> torch.nn.Module | None:
        import torch

        from pageloom_quant.packed import PackedWeight, packed_linear

        asked: Sequence[Slice | None] = parts or [None] * len(names)
        cuts = dict(zip(names, asked, strict=True))
        sizes = dict(zip(names, out_features, strict=True))
        weights = [
            self._sized_weight(name, in_features, sizes[name], cut)
            for name, cut in cuts.items()
            if name in self._layers
        ]
        if not weights:
            return None
        if len(weights) < len(names) or len({weight.group_size for weight in weights}) > 1:
            log.warning(
                "%s are computed as one but not stored alike: they are expanded", ", ".join(names)
            )
            return None
        biases = [self._bias(name, sizes[name], cuts[name]) for name in names] if bias else []
        self._supplied.update(names)
        added = torch.cat(biases) if bias else None
        return packed_linear(PackedWeight.cat(weights), added, dtype, device)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self.tensors_of({})

    def tensors_of(self, parts: Mapping[str, Slice | None]) -> Iterator[tuple[str, torch.Tensor]]:
        import torch

        yield from self.checkpoint.tensors_of(self._plain_tensors(), parts)
        for layer in sorted(self._layers - self._supplied):
            name = f"{layer}.weight"
            part = parts.get(name)
            if part is None and name in parts:
                continue
            weight, start = self._around(layer, self.layout(layer), part)
            expanded = weight.dequantize(torch.float32)
            if part is not None:
                expanded = expanded.narrow(part.dim, start, part.stop - part.start)
            yield name, expanded

    def input_unit(self, name: str) -> int:
        from pageloom_quant.packed.weight import LEAST_GROUP

        if name not in self._layers:
            return 1
        layout = self.layout(name)
        return LEAST_GROUP if layout.group_size == layout.inputs else layout.group_size

    def kv_scales(self) -> Mapping[tuple[int, Kind], float]:
        return read_kv_scales(self.checkpoint)

    @abstractmethod
    def read_settings(self) -> None:
        """Read `Checkpoint.quantization`. Raises what `config_error` makes for whatever is in it
        that this loader does not read."""

    @abstractmethod
    def layout(self, layer: str) -> Layout:
        """The sizes of a packed layer. Raises `ValueError` that names file and tensor."""

    @abstractmethod
    def packed_weight(
        self, layer: str, layout: Layout, outputs: slice, inputs: slice
    ) -> PackedWeight:
        """Those outputs and inputs of a packed layer of this `layout`. They begin at a multiple of
        `WORD` or of the group size, and end at one or with the layer. Raises `ValueError` that
        names file and tensor.
        """

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

    def scales(
        self, layer: str, part: str, shape: Sequence[int], read: tuple[slice, slice]
    ) -> torch.Tensor:
        """What is to be ``read`` of the `part` that holds scales; all of it is finite."""
        scales = self.part(layer, part, SCALE_DTYPES, shape)[read]
        if not bool(scales.isfinite().all()):
            raise self.tensor_error(f"{layer}.{part}", "but not all of its scales are finite")
        return scales

    def group_size(self, layer: str, in_features: int, wanted: int) -> int:
        """``wanted`` inputs per group, or all of them if it is -1. Raises `ValueError` if the
        inputs of ``layer`` cannot be cut into such groups."""
        size = in_features if wanted == -1 else wanted
        if in_features % size or size % 2:
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

    def _sized_weight(
        self, layer: str, in_features: int, out_features: int, part: Slice | None
    ) -> PackedWeight:
        layout = self.layout(layer)
        if (layout.inputs, layout.outputs) != (in_features, out_features):
            raise self.tensor_error(
                f"{layer}.{self.PARTS[0]}",
                f"a layer from {layout.inputs} to {layout.outputs}, but the configuration says "
                f"from {in_features} to {out_features}",
            )
        weight, start = self._around(layer, layout, part)
        if part is None:
            return weight
        end = start + part.stop - part.start
        if part.dim == 0:
            return weight.rows(start, end)
        try:
            return weight.columns(start, end)
        except ValueError as error:
            raise self.tensor_error(
                f"{layer}.{self.PARTS[0]}",
                f"whose groups of {layout.group_size} inputs would be cut at {part.start} and "
                f"{part.stop} into some that are too small; set parallel.tensor_parallel_size so "
                "that they are not",
            ) from error

    def _around(self, layer: str, layout: Layout, part: Slice | None) -> tuple[PackedWeight, int]:
        """The least that can be read around ``part``, and where that begins in it."""
        read, start = [slice(0, layout.outputs), slice(0, layout.inputs)], 0
        if part is not None:
            part.check(f"{layer}.weight", (layout.outputs, layout.inputs))
            unit = (WORD, layout.group_size)[part.dim]
            start = part.start % unit
            end = min(-(-part.stop // unit) * unit, part.size)
            read[part.dim] = slice(part.start - start, end)
        return self.packed_weight(layer, layout, *read), start

    def _bias(self, layer: str, size: int, part: Slice | None) -> torch.Tensor:
        name = f"{layer}.bias"
        self._supplied_biases.add(name)
        bias = self.part(layer, "bias", SCALE_DTYPES, [size])
        return part.of(name, bias) if part is not None and part.dim == 0 else bias

    def _plain_tensors(self) -> Iterator[str]:
        for name in self.checkpoint.files:
            layer, _, part = name.rpartition(".")
            packed = layer in self._layers and part in self.PARTS
            if not (packed or name in self._supplied_biases or is_kv_scale(name)):
                yield name

    def tensor_error(self, name: str, problem: str) -> ValueError:
        tensor = self.checkpoint.tensor(name)
        dtype = str(tensor.dtype).removeprefix("torch.")
        return ValueError(
            f"{self.checkpoint.files[name]} has tensor {name!r} as {dtype} {list(tensor.shape)}, "
            f"{problem}"
        )

    def config_error(self, problem: str) -> ValueError:
        return ValueError(f"{self.checkpoint.folder / 'config.json'} has {problem}")
