"""Tile sizes, by fixed rules.

Tuning while serving would make the first requests wait, and tables of tuned sizes exist only for
the chips that someone had. A program must hold its rows of results in registers, and in shared
memory its queries and the tiles of K and V that are on their way. The sizes are the largest tried
that do so without spilling, which ``benchmarks/results/triton_resources.json`` shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Family = Literal["ampere", "hopper", "amd", "interpreter"]
PROGRAMS_PER_PROCESSOR = 2  # so that one computes while the other waits for memory
SCALE_BYTES = 4  # of a vector that carries its own


@dataclass(frozen=True, slots=True)
class Chip:
    family: Family
    """``hopper`` stands for all that have its shared memory and multiply matrices by groups of
    warps, data-center Blackwell too; ``ampere`` for all other NVIDIA GPUs from sm_80 on; and
    ``interpreter`` for a CPU with Triton's interpreter, which takes as long for any size."""

    processors: int  # streaming multiprocessors; compute units on AMD

    @property
    def programs(self) -> int:
        """How many programs fill it."""
        return self.processors * PROGRAMS_PER_PROCESSOR


@dataclass(frozen=True, slots=True)
class Tiles:
    rows: int  # query rows of a program, a power of 2 and at least 16
    tokens: int  # of K and V per iteration, likewise
    num_warps: int
    num_stages: int


def choose(
    family: Family, head_size: int, itemsize: int, group: int, decode: bool, coded: bool = False
) -> Tiles:
    """Tiles for a decode step, in which every sequence has ``group`` rows, or for any other.

    ``itemsize`` is that of what is multiplied, ``coded`` says that K and V become it in registers.
    """
    tiles = _uncoded(family, head_size, itemsize, group, decode)
    if coded and family == "amd":
        return replace(tiles, tokens=max(tiles.tokens // 2, 16))
    return tiles


def _uncoded(family: Family, head_size: int, itemsize: int, group: int, decode: bool) -> Tiles:
    width = power_of_2(head_size)
    if family == "interpreter":
        return Tiles(128, 128, num_warps=1, num_stages=1)
    if itemsize == 4:
        # Matrix units take float32 in parts, which fill the registers.
        return Tiles(16, _tokens(4096, width, 64), num_warps=4, num_stages=3)
    if decode or width > 256:
        # Memory decides: few rows, and as much of K and V on the way as there is room for. A
        # stage more is needed than tiles are wanted, once for each of two dependent loads.
        rows = min(max(power_of_2(group), 16), 64) if decode else 16
        tokens = _tokens(8192, width, 64 if family == "amd" else 128)
        warps = 8 if width > 128 or rows > 16 else 4
        return Tiles(rows, tokens, warps, num_stages=2 if family == "amd" else 5)
    if family == "hopper":
        return Tiles(128, _tokens(8192, width, 64), num_warps=8, num_stages=3)
    rows = 128 if width <= 128 else 64
    if family == "amd":
        return Tiles(rows, 32 if width <= 128 else 16, num_warps=8, num_stages=2)
    return Tiles(rows, 64 if width <= 64 else 32, num_warps=8, num_stages=3)


def vectors(family: Family, head_size: int) -> int:
    """How many vectors of K and as many of V a program stores, a power of 2."""
    return (16384 if family == "interpreter" else 2048) // power_of_2(head_size)


def power_of_2(n: int) -> int:
    """The least power of 2 that is at least ``n``, and at least 16."""
    return max(16, 1 << (n - 1).bit_length())


def _tokens(elements: int, width: int, most: int) -> int:
    """How many tokens ``elements`` elements of K are, at least 16."""
    return min(max(elements // width, 16), most)
