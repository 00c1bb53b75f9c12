"""Four bits for each element of a rotated vector.

A vector of K often has a few elements far larger than the others, and four bits in even steps are
spent on those. Rotated by a random sign for each element and a Walsh-Hadamard transform, the vector
has its length spread over all elements, which then are nearly normal, whatever they were before
(QuaRot, arXiv 2404.00456). For such numbers the 16 values that lose least are known (Lloyd 1982,
Max 1960). What is stored is which of them each element is nearest to, and the vector's root mean
square.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from pageloom.contract import KVQuantizer
from pageloom.contract.quantizer import Kind

LEVELS = 16
LEAST = 2.0**-100  # whose inverse float32 still holds


class Rotated4(KVQuantizer):
    """``head_size / 2`` bytes of codes, two in each, the even index low; then a float32."""

    def bytes_per_vector(self, head_size: int) -> int:
        if head_size < 2 or head_size & (head_size - 1):
            raise ValueError(f"rotated4 needs a head size that is a power of two, not {head_size}")
        return head_size // 2 + 4

    def encode(self, x: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        most = torch.finfo(torch.float32).max
        x = x.float().clamp(-most, most)
        # Squares of the numbers themselves might overflow.
        largest = x.abs().amax(-1, keepdim=True).clamp_min(LEAST)
        x = x / largest
        size = root_mean_square(x)
        normal = rotated(x * signs(x.shape[-1], x.device)) / size.clamp_min(LEAST)
        codes = torch.bucketize(normal, boundaries(x.device)).to(torch.uint8)
        packed = codes[..., ::2] | codes[..., 1::2] << 4
        return torch.cat([packed, (largest * size).view(torch.uint8)], dim=-1)

    def decode(
        self, data: torch.Tensor, layer: int, kind: Kind, dtype: torch.dtype
    ) -> torch.Tensor:
        packed = data[..., :-4]
        # A copy always: where they lie need not be aligned.
        size = data[..., -4:].clone(memory_format=torch.contiguous_format).view(torch.float32)
        codes = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(-2)
        normal = levels(data.device)[codes.long()]
        x = rotated(normal) * signs(normal.shape[-1], data.device) * size
        most = min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)
        return x.clamp(-most, most).to(dtype)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """The orthonormal Walsh-Hadamard transform of ``[..., n]``, which is its own inverse.

    In sums and differences of pairs: a matrix product would add in another order for another
    number of vectors, and so store the same vector in different ways.
    """
    n, half = x.shape[-1], 1
    while half < n:
        a, b = x.unflatten(-1, (n // (2 * half), 2, half)).unbind(-2)
        x = torch.stack([a + b, a - b], dim=-2).flatten(-3)
        half *= 2
    return x * n**-0.5


def root_mean_square(x: torch.Tensor) -> torch.Tensor:
    """Of ``[..., n]``, as ``[..., 1]``; added in a fixed order, as in `rotated`."""
    n, total = x.shape[-1], x.square()
    while total.shape[-1] > 1:
        half = total.shape[-1] // 2
        total = total[..., :half] + total[..., half:]
    return (total / n).sqrt()


@cache
def signs(n: int, device: torch.device) -> torch.Tensor:
    """``n`` times 1 or -1, always the same: a constant vector is not to become a single peak."""
    drawn = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n))
    return (2.0 * drawn - 1).to(device)


@cache
def levels(device: torch.device) -> torch.Tensor:
    """The 16 values that stand for a normal number with the least mean square error.

    By Lloyd's method: every value becomes the mean of what is nearest to it.
    """
    x = torch.linspace(-2.5, 2.5, LEVELS, dtype=torch.float64)
    edge = torch.tensor([math.inf], dtype=torch.float64)
    for _ in range(1000):
        ends = torch.cat([-edge, (x[1:] + x[:-1]) / 2, edge])
        density = torch.exp(-ends.square() / 2) / math.sqrt(2 * math.pi)
        x = -density.diff() / torch.special.ndtr(ends).diff()
    return x.float().to(device)


@cache
def boundaries(device: torch.device) -> torch.Tensor:
    """Between which of the 15 boundaries a number lies says which level is nearest."""
    values = levels(device)
    return (values[1:] + values[:-1]) / 2
