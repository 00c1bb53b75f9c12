"""The linear layers of a model, or one rank's parts of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pageloom.contract import Rank, Slice, WeightLoader
from pageloom.models.model import UnsupportedModelError
from pageloom.models.shards import TENSOR
from pageloom.models.slots import WeightSlots
from pageloom.ops.linear import Linear


class LinearLayers:
    """Makes layers: those that ``loader`` supplies are used as they are, for others there is a
    `Linear` whose tensors ``slots`` expects."""

    def __init__(
        self,
        loader: WeightLoader,
        slots: WeightSlots,
        rank: Rank,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._loader = loader
        self._slots = slots
        self._rank = rank
        self._dtype = dtype
        self._device = device
        self._plain: list[Linear] = []

    def by_outputs(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        outputs: Sequence[range],
    ) -> nn.Module:
        """Layers that read the same input as one, of each of which this rank has some outputs."""
        sizes = zip(outputs, out_features, strict=True)
        parts = [Slice(0, each.start, each.stop, size) for each, size in sizes]
        supplied = self.supplied(names, in_features, out_features, bias, parts)
        if supplied is not None:
            return self._complete(names, bias, supplied)
        layer = self._new(sum(len(each) for each in outputs), in_features, bias)
        start = 0
        for name, part, each in zip(names, parts, outputs, strict=True):
            self._expect(f"{name}.weight", layer.weight.narrow(0, start, len(each)), part)
            if layer.bias is not None:
                self._expect(f"{name}.bias", layer.bias.narrow(0, start, len(each)), part)
            start += len(each)
        return layer

    def by_inputs(
        self, name: str, in_features: int, out_features: int, bias: bool, inputs: range
    ) -> nn.Module:
        """A layer that is summed over tensor ranks, of which one adds the bias."""
        bias = bias and self._rank.tensor_rank == 0
        part = Slice(1, inputs.start, inputs.stop, in_features)
        supplied = self.supplied([name], in_features, [out_features], bias, [part])
        if supplied is not None:
            return self._complete([name], bias, supplied)
        layer = self._new(out_features, len(inputs), bias)
        self._expect(f"{name}.weight", layer.weight, part)
        if layer.bias is not None:
            self._slots.add(f"{name}.bias", layer.bias)
        return layer

    def sharing(self, weight: torch.Tensor) -> nn.Module:
        """A layer whose weight is one that is loaded as something else."""
        layer = Linear(weight, None)
        self._plain.append(layer)
        return layer

    def input_unit(self, name: str) -> int:
        """`WeightLoader.input_unit` where inputs are divided."""
        return self._loader.input_unit(name) if self._rank.tensor_size > 1 else 1

    def supplied(
        self,
        names: Sequence[str],
        in_features: int,
        out_features: Sequence[int],
        bias: bool,
        parts: Sequence[Slice],
    ) -> nn.Module | None:
        """What the loader answers. Raises `UnsupportedModelError` if it cannot be asked for parts
        and these are."""
        loader = self._loader
        asked = (names, in_features, out_features, bias, self._dtype, self._device)
        if self._rank.tensor_size == 1:
            return loader.linear(*asked)
        if loader.supports_parts:
            return loader.linear(*asked, parts=parts)
        if type(loader).linear is WeightLoader.linear:
            return None
        raise UnsupportedModelError(
            f"{type(loader).__name__} makes linear layers itself and cannot divide them over "
            f"{self._rank.tensor_size} tensor ranks; set {TENSOR} to 1 (stages, by "
            "parallel.pipeline_parallel_size, have whole layers)."
        )

    def finish(self) -> None:
        """Once all tensors have come."""
        for layer in self._plain:
            layer.finish()

    def _complete(self, names: Sequence[str], bias: bool, layer: nn.Module) -> nn.Module:
        for name in names:
            self._slots.refuse(f"{name}.weight")
            if bias:
                self._slots.refuse(f"{name}.bias")
        return layer

    def _new(self, out_features: int, in_features: int, bias: bool) -> Linear:
        weight = torch.empty(out_features, in_features, dtype=self._dtype, device=self._device)
        layer = Linear(weight, weight.new_empty(out_features) if bias else None)
        self._plain.append(layer)
        return layer

    def _expect(self, name: str, target: torch.Tensor, part: Slice) -> None:
        whole = part.stop - part.start == part.size
        self._slots.add(name, target, None if whole else part)
