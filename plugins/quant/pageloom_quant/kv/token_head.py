"""Formats in which the vector of each token and KV head carries its own scale."""

from __future__ import annotations

from typing import ClassVar

import torch

from pageloom.contract import KVQuantizer, VectorLayout
from pageloom.contract.quantizer import Kind
from pageloom_quant.kv.codes import CODES, Float8, pack_nibbles, unpack_nibbles

LEAST_SCALED = 2.0**-100  # whose inverse float32 still holds
LEAST_STEP = 2.0**-24  # the smallest float16
MARGIN = 0.875  # of the largest number, so that a decoded one stays finite
FITS = 16  # scales within an octave, among which fp8 finds the one that fits best


class TokenHeadQuantizer(KVQuantizer):
    """Eight-bit codes, then a float32 scale."""

    layout: ClassVar[VectorLayout]

    def bytes_per_vector(self, head_size: int) -> int:
        return self.layout.bytes_per_vector(head_size)

    def encode(self, x: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        codes = CODES[self.layout.element]
        x = limited(x, x.dtype)
        largest = x.abs().amax(-1, keepdim=True).clamp_min(LEAST_SCALED)
        scale = self.scale(x, divided(largest, codes.limit))
        return torch.cat([codes.pack(x * (1 / scale)), scale.view(torch.uint8)], dim=-1)

    def decode(
        self, data: torch.Tensor, layer: int, kind: Kind, dtype: torch.dtype
    ) -> torch.Tensor:
        scale = scaling(data, torch.float32)
        return (CODES[self.layout.element].unpack(data[..., :-4]) * scale).to(dtype)

    def scale(self, x: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        """That of each vector ``x [..., head_size]``; no code is clipped from ``least [..., 1]``
        on."""
        return least


class Float8TokenHead(TokenHeadQuantizer):
    """The error of a floating-point code depends on where between two codes a number comes to lie.
    So another scale may fit a vector better, and those of an octave are all that differ."""

    def scale(self, x: torch.Tensor, least: torch.Tensor) -> torch.Tensor:
        codes = CODES[self.layout.element]
        assert isinstance(codes, Float8)
        best, scale = torch.full_like(least, torch.inf), least
        for fit in range(FITS):
            candidate = least * 2 ** (fit / FITS)
            scaled = (x * (1 / candidate)).clamp_(-codes.limit, codes.limit)
            steps = (codes.unpack(codes.pack(scaled)) - scaled) * (256 / codes.step)
            # A sum of small whole numbers is the same in any order.
            error = steps.round_().square_().sum(-1, keepdim=True) * 4 ** (fit / FITS)
            scale = torch.where(error < best, candidate, scale)
            best = torch.minimum(error, best)
        return scale


class FP8E4M3(Float8TokenHead):
    layout = VectorLayout("fp8_e4m3", "token_head")


class FP8E5M2(Float8TokenHead):
    layout = VectorLayout("fp8_e5m2", "token_head")


class Int8(TokenHeadQuantizer):
    layout = VectorLayout("int8", "token_head")


class Int4(KVQuantizer):
    """Four-bit codes from the vector's least element on, then scale and least as float16."""

    layout = VectorLayout("int4", "token_head")

    def bytes_per_vector(self, head_size: int) -> int:
        return self.layout.bytes_per_vector(head_size)

    def encode(self, x: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        x = limited(x, torch.float16)
        least = x.amin(-1, keepdim=True).half()
        spread = x.amax(-1, keepdim=True) - least.float()
        step = divided(spread, 15).clamp_min(LEAST_STEP).half()
        codes = ((x - least.float()) * (1 / step.float())).clamp(0, 15).round_()
        packed = pack_nibbles(torch.nan_to_num(codes))
        return torch.cat([packed, step.view(torch.uint8), least.view(torch.uint8)], dim=-1)

    def decode(
        self, data: torch.Tensor, layer: int, kind: Kind, dtype: torch.dtype
    ) -> torch.Tensor:
        step, least = scaling(data, torch.float16).float().split(1, dim=-1)
        x: torch.Tensor = unpack_nibbles(data[..., :-4]) * step + least
        return x.to(dtype)


def scaling(data: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The last four bytes of coded vectors ``[..., bytes]``, as numbers of ``dtype``."""
    # A copy always: where they lie need not be aligned.
    return data[..., -4:].clone(memory_format=torch.contiguous_format).view(dtype)


def divided(x: torch.Tensor, by: float) -> torch.Tensor:
    """``x / by``, rounded once: on CUDA torch multiplies by the rounded inverse of a number."""
    return x / torch.full_like(x, by)


def limited(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``x`` as float32, infinities and what comes near them brought into the range of ``dtype``."""
    most = MARGIN * min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
    return x.float().clamp(-most, most)
