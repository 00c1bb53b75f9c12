"""Formats whose scale is a constant of each layer."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from pageloom.contract import KVQuantizer, VectorLayout
from pageloom.contract.quantizer import Element, Kind
from pageloom_quant.kv.codes import CODES

log = logging.getLogger(__name__)

KINDS: tuple[Kind, Kind] = ("k", "v")
CALIBRATED: Element = "fp8_e4m3"  # for whose codes tools that calibrate make scales
USABLE = "from 2**-120 to 2**120"  # so that float32 holds a scale and its inverse


class StaticQuantizer(KVQuantizer):
    """Codes are ``x / scale``, with one scale for K and one for V of each layer.

    A scale comes from the YAML, or else from the checkpoint; where neither has one it is 1.0,
    and a warning says so.
    """

    layout: ClassVar[VectorLayout]

    @dataclass
    class Config:
        k_scale: float | None = None
        """Scale of K in every layer; None takes those of the checkpoint."""
        v_scale: float | None = None

        def __post_init__(self) -> None:
            for name, scale in (("k_scale", self.k_scale), ("v_scale", self.v_scale)):
                if scale is not None and not _is_usable(scale):
                    raise ValueError(f"{name} must be {USABLE}, not {scale}")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._given: dict[Kind, float | None] = {"k": config.k_scale, "v": config.v_scale}
        self._scales: dict[tuple[int, Kind], float] = {}

    @property
    def wants_scales(self) -> bool:
        return None in self._given.values()

    def set_scales(self, num_layers: int, scales: Mapping[tuple[int, Kind], float]) -> None:
        for (layer, kind), scale in scales.items():
            if self._given[kind] is not None:
                continue
            if layer >= num_layers:
                raise ValueError(
                    f"the checkpoint has a {kind}_scale of layer {layer}, but the model has "
                    f"{num_layers} layers"
                )
            if not _is_usable(scale):
                raise ValueError(
                    f"the checkpoint's {kind}_scale of layer {layer} must be {USABLE}, not {scale}"
                )
            self._scales[layer, kind] = scale
        self._warn_of_other_codes()
        self._warn_of_missing(num_layers)

    def _warn_of_other_codes(self) -> None:
        element = self.layout.element
        if self._scales and element != CALIBRATED:
            ratio = CODES[CALIBRATED].limit / CODES[element].limit
            log.warning(
                "the checkpoint's scales are used for %s as they are; if they were made for %s, as "
                "is usual, set the options k_scale and v_scale to about %.3g times theirs",
                element,
                CALIBRATED,
                ratio,
            )

    def _warn_of_missing(self, num_layers: int) -> None:
        missing = {
            kind: [i for i in range(num_layers) if (i, kind) not in self._scales]
            for kind in KINDS
            if self._given[kind] is None
        }
        if missing.get("k") == missing.get("v"):
            names = {"k_scale and v_scale": missing.get("k", [])}
        else:
            names = {f"{kind}_scale": layers for kind, layers in missing.items()}
        for name, layers in names.items():
            if layers:
                some = "any layer" if len(layers) == num_layers else f"layers {_ranges(layers)}"
                log.warning(
                    "the checkpoint has no %s of %s, so 1.0 is used; kv_cache.options can set %s",
                    name,
                    some,
                    name,
                )

    def static_scale(self, layer: int, kind: Kind) -> float:
        given = self._given[kind]
        return self._scales.get((layer, kind), 1.0) if given is None else given

    def bytes_per_vector(self, head_size: int) -> int:
        return self.layout.bytes_per_vector(head_size)

    def encode(self, x: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        inverse = 1 / torch.tensor(self.static_scale(layer, kind), dtype=torch.float32)
        return CODES[self.layout.element].pack(x.float() * inverse)

    def decode(
        self, data: torch.Tensor, layer: int, kind: Kind, dtype: torch.dtype
    ) -> torch.Tensor:
        codes = CODES[self.layout.element].unpack(data)
        return (codes * self.static_scale(layer, kind)).to(dtype)


class FP8E4M3(StaticQuantizer):
    layout = VectorLayout("fp8_e4m3", "static")


class FP8E5M2(StaticQuantizer):
    layout = VectorLayout("fp8_e5m2", "static")


class Int8(StaticQuantizer):
    layout = VectorLayout("int8", "static")


class Int4(StaticQuantizer):
    layout = VectorLayout("int4", "static")


def _is_usable(scale: float) -> bool:
    return math.isfinite(scale) and 2**-120 <= scale <= 2**120


def _ranges(numbers: list[int]) -> str:
    """``0-2, 5`` for 0, 1, 2 and 5."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and spans[-1][1] == number - 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
