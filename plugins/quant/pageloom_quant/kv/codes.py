"""From scaled numbers to the codes of each element type, and back.

`pageloom.contract.VectorLayout` says what the codes mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from pageloom.contract.quantizer import Element


@dataclass(frozen=True)
class Float8:
    """Limited to the finite numbers of ``dtype``; NaN stays NaN."""

    dtype: torch.dtype

    @property
    def limit(self) -> float:
        return torch.finfo(self.dtype).max

    @property
    def step(self) -> float:
        """From the largest number to the one before it."""
        return torch.finfo(self.dtype).eps * 2.0 ** math.floor(math.log2(self.limit))

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        return scaled.clamp(-self.limit, self.limit).to(self.dtype).view(torch.uint8)

    def unpack(self, data: torch.Tensor) -> torch.Tensor:
        return data.view(self.dtype).float()


@dataclass(frozen=True)
class Int8:
    """-127 to 127; -128 is NaN."""

    limit: float = 127.0

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        codes = scaled.clamp(-self.limit, self.limit).round_()
        return torch.nan_to_num(codes, nan=-128.0).to(torch.int8).view(torch.uint8)

    def unpack(self, data: torch.Tensor) -> torch.Tensor:
        codes = data.view(torch.int8).float()
        return codes.masked_fill_(codes == -128, torch.nan)


@dataclass(frozen=True)
class Int4:
    """-7 to 7, stored as 1 to 15; 0 is NaN."""

    limit: float = 7.0

    def pack(self, scaled: torch.Tensor) -> torch.Tensor:
        codes = scaled.clamp(-self.limit, self.limit).round_().add_(8)
        return pack_nibbles(torch.nan_to_num(codes, nan=0.0))

    def unpack(self, data: torch.Tensor) -> torch.Tensor:
        codes = unpack_nibbles(data)
        return torch.where(codes == 0, torch.nan, codes - 8)


CODES: Mapping[Element, Float8 | Int8 | Int4] = MappingProxyType(
    {
        "fp8_e4m3": Float8(torch.float8_e4m3fn),
        "fp8_e5m2": Float8(torch.float8_e5m2),
        "int8": Int8(),
        "int4": Int4(),
    }
)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Whole numbers 0 to 15, ``[..., n]``, as ``uint8 [..., n / 2]``, the even index low."""
    codes = codes.to(torch.uint8)
    return codes[..., ::2] | codes[..., 1::2] << 4


def unpack_nibbles(data: torch.Tensor) -> torch.Tensor:
    """Float32 ``[..., 2 n]`` from what `pack_nibbles` made."""
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2).float()
