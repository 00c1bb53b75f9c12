"""Which template instances of the kernels a layer needs, and how they are launched."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from pageloom.contract import VectorLayout

KERNELS = Path(__file__).with_name("kernels")
SOURCE = KERNELS / "kernels.cu"
THREADS = 128  # of a thread block
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_HEAD_SIZE = 256
ELEMENTS = {"fp8_e4m3": "E4M3", "fp8_e5m2": "E5M2", "int8": "Int8", "int4": "Int4"}
SCALINGS = {"static": "Static", "token_head": "TokenHead"}


@dataclass(frozen=True, slots=True)
class Instance:
    """The kernels for layers of one shape."""

    dtype: torch.dtype
    head_size: int
    group: int  # query heads per KV head
    block_size: int
    layout: VectorLayout | None = None  # of coded vectors

    @property
    def kernels(self) -> Mapping[str, str]:
        """The C++ name of the kernel that plays each part."""
        kind, d, g, b = TYPES[self.dtype], self.head_size, self.group, self.block_size
        stored = self._format
        names = {
            "store": f"store<{kind}, {stored}, {d}, {b}>",
            "copy": "copy<uint4>",
            "merge": f"merge<{kind}, {d}>",
        }
        if self.has_scales:
            names["copy_scales"] = "copy<uint2>"
        if self.on_tensor_cores:
            names["decode"] = f"decode<{kind}, {stored}, {d}, {g}, {b}>"
            names["prefill"] = f"prefill<{kind}, {stored}, {d}, {g}, {b}, {self._row_tiles}>"
        else:
            names["decode"] = names["prefill"] = f"plain<{stored}, {d}, {g}, {b}>"
        return names

    @property
    def has_scales(self) -> bool:
        """Whether each vector carries its own, four bytes, which lie apart from the codes."""
        return self.layout is not None and self.layout.scaling == "token_head"

    @property
    def vector_bytes(self) -> int:
        """Of one vector of K or V, without its scale."""
        if self.layout is None:
            return self.head_size * self.dtype.itemsize
        return self.layout.bytes_per_vector(self.head_size) - 4 * self.has_scales

    @property
    def store_threads(self) -> int:
        """Threads that store one vector: each 16 bytes, or codes for eight elements, in which the
        shuffles of a scale want a power of two."""
        if self.layout is None:
            return self.vector_bytes // 16
        return 1 << (self.head_size // 8 - 1).bit_length()

    @property
    def on_tensor_cores(self) -> bool:
        return self.dtype is not torch.float32

    @property
    def decode_tiles(self) -> int:
        """Thread blocks that share the query heads of a KV head in a decode."""
        return -(-self.group // (16 if self.on_tensor_cores else min(self.group, 8)))

    @property
    def prefill_tiles(self) -> int:
        """The same in a prefill."""
        return 1 if self.on_tensor_cores else self.decode_tiles

    @property
    def prefill_rows(self) -> int:
        """Rows, a query token times a query head of the group, of a thread block in a prefill."""
        return 64 * self._row_tiles if self.on_tensor_cores else self.group

    @property
    def _format(self) -> str:
        """The C++ type of the format."""
        if self.layout is None:
            return f"Raw<{TYPES[self.dtype]}>"
        return f"{SCALINGS[self.layout.scaling]}<{ELEMENTS[self.layout.element]}>"

    @property
    def _row_tiles(self) -> int:
        # Twice the rows per warp read K and V half as often from shared memory, while registers
        # last.
        return 2 if self.head_size <= 64 else 1


class Kernels(Protocol):
    """The kernels of one instance, ready to run."""

    def launch(
        self, part: str, grid: tuple[int, int, int], threads: int, params: Structure
    ) -> None:
        """Run the kernel that plays ``part``, in order with the other work of this thread."""
