"""A weight matrix of 4-bit or 8-bit codes in groups."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pageloom_quant.kv.codes import pack_nibbles, unpack_nibbles

BITS = (4, 8)
LEAST_GROUP = 32
"""The smallest that native code reads, and so the smallest that cutting a weight makes."""
PARAMETER_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class PackedWeight:
    """``weight[o, i] = code[o, i] * scales[o, i // group_size] + minimums[o, i // group_size]``.

    Every format of integers in groups is that: around zero point ``z``, ``minimum = -z * scale``.
    Raises `ValueError` where shapes or dtypes do not fit each other.
    """

    codes: torch.Tensor
    """``uint8``. With 4 bits ``[out, in / 2]``: codes 0 to 15, the even index in the low half of a
    byte, as `PackedWeight.from_codes` packs them. With 8 bits ``[out, in]``: codes 0 to 255."""
    scales: torch.Tensor
    """``[out, in / group_size]``, in one of `PARAMETER_DTYPES`, as is `minimums`."""
    minimums: torch.Tensor
    group_size: int
    """Neighbours along the inputs that share a scale; `in_features` where a row has one scale."""
    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ValueError(f"codes of {self.bits} bits cannot be packed, only of 4 or 8")
        if self.codes.ndim != 2 or self.codes.dtype != torch.uint8:
            raise ValueError(f"codes must be uint8 and of two dimensions, not {_text(self.codes)}")
        if self.group_size < 1 or self.in_features % self.group_size:
            raise ValueError(
                f"{self.in_features} inputs cannot be cut into groups of {self.group_size}"
            )
        expected = (self.out_features, self.in_features // self.group_size)
        for name in ("scales", "minimums"):
            found = getattr(self, name)
            if found.shape != expected or found.dtype not in PARAMETER_DTYPES:
                raise ValueError(
                    f"{name} must be floating-point numbers {list(expected)}, not {_text(found)}"
                )

    @classmethod
    def from_codes(
        cls, codes: torch.Tensor, scales: torch.Tensor, minimums: torch.Tensor
    ) -> PackedWeight:
        """From one 4-bit code per byte, ``uint8 [out, in]`` with values 0 to 15."""
        if codes.shape[-1] % 2:
            raise ValueError(f"{codes.shape[-1]} inputs cannot be packed two by two")
        if codes.numel() and int(codes.max()) > 15:
            raise ValueError(f"code {int(codes.max())} does not fit into 4 bits")
        groups = max(1, scales.shape[-1])
        return cls(pack_nibbles(codes), scales, minimums, codes.shape[-1] // groups)

    @staticmethod
    def cat(weights: Sequence[PackedWeight]) -> PackedWeight:
        """Layers that read the same input as one, outputs in the order of ``weights``.

        Raises `ValueError` unless all have the same inputs, bits and group size.
        """
        kinds = {(w.in_features, w.bits, w.group_size) for w in weights}
        if len(kinds) != 1:
            raise ValueError(
                "weights of different (inputs, bits, group size) cannot be one layer: "
                f"{sorted(kinds)}"
            )
        return PackedWeight(
            torch.cat([w.codes for w in weights]),
            torch.cat([w.scales for w in weights]),
            torch.cat([w.minimums for w in weights]),
            weights[0].group_size,
            weights[0].bits,
        )

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * 8 // self.bits

    @property
    def format(self) -> str:
        """What memory reports call it."""
        return f"int{self.bits}"

    def rows(self, start: int, end: int) -> PackedWeight:
        """Outputs ``start`` to ``end``: views."""
        return PackedWeight(
            self.codes[start:end],
            self.scales[start:end],
            self.minimums[start:end],
            self.group_size,
            self.bits,
        )

    def columns(self, start: int, end: int) -> PackedWeight:
        """Inputs ``start`` to ``end``. Where that cuts groups, all become smaller, each with the
        scale of the one that it was part of.

        Raises `ValueError` where they would be smaller than `LEAST_GROUP`, or bytes cut.
        """
        whole = self.group_size == self.in_features
        size = end - start if whole else math.gcd(self.group_size, start, end)
        if start % 2 or end % 2 or size < min(LEAST_GROUP, self.group_size):
            raise ValueError(
                f"groups of {self.group_size} of {self.in_features} inputs cannot be cut at "
                f"{start} and {end} into such of {size}: the least is {LEAST_GROUP}"
            )
        codes = self.codes[:, start * self.bits // 8 : end * self.bits // 8]
        if whole:
            return PackedWeight(codes, self.scales, self.minimums, size, self.bits)
        scales, minimums = (
            each.repeat_interleave(self.group_size // size, 1)[:, start // size : end // size]
            for each in (self.scales, self.minimums)
        )
        return PackedWeight(codes, scales, minimums, size, self.bits)

    def to(self, device: torch.device) -> PackedWeight:
        """The same on another device."""
        return PackedWeight(
            self.codes.to(device),
            self.scales.to(device),
            self.minimums.to(device),
            self.group_size,
            self.bits,
        )

    def unpacked_codes(self) -> torch.Tensor:
        """Float32 ``[out, in]``."""
        return unpack_nibbles(self.codes) if self.bits == 4 else self.codes.float()

    def centred(
        self, dtype: torch.dtype, narrow: Sequence[torch.dtype]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Scales, and what is to be added where codes are less half their range; None if it is 0.

        They are in the first of the 16-bit dtypes ``narrow`` that holds them exactly, as one does
        for most formats, and otherwise float32. For layers of a ``dtype`` narrower than float32
        offsets may be rounded to float16 too: by 2^-12, where the expanded weights would have been
        by 2^-9 in bfloat16.
        """
        scales = self.scales.float()
        offsets = self.minimums.float() + scales * (1 << (self.bits - 1))
        rounds = dtype != torch.float32 and bool(offsets.half().isfinite().all())
        stored = torch.float32
        for kind in narrow:
            exact = _holds(kind, offsets) or (rounds and kind == torch.float16)
            if _holds(kind, scales) and exact:
                stored = kind
                break
        return scales.to(stored), offsets.to(stored) if bool(offsets.any()) else None

    def dequantize(self, dtype: torch.dtype) -> torch.Tensor:
        """The weight ``[out, in]``, computed in float32 and then rounded: what every module that
        multiplies by it is measured against."""
        codes: torch.Tensor = self.unpacked_codes().unflatten(1, (-1, self.group_size))
        codes.mul_(self.scales.float()[..., None]).add_(self.minimums.float()[..., None])
        return codes.flatten(1).to(dtype)


def _holds(dtype: torch.dtype, numbers: torch.Tensor) -> bool:
    return torch.equal(numbers.to(dtype).float(), numbers)


def _text(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
