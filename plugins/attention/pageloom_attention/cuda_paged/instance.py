"""Which template instances of the kernels a layer needs, and how they are launched."""

from __future__ import annotations

from collections.abc import Mapping
from ctypes import Structure
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

KERNELS = Path(__file__).with_name("kernels")
SOURCE = KERNELS / "kernels.cu"
THREADS = 128  # of a thread block
TYPES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float16: "fp16"}
MAX_HEAD_SIZE = 256


@dataclass(frozen=True, slots=True)
class Instance:
    """The kernels for layers of one shape."""

    dtype: torch.dtype
    head_size: int
    group: int  # query heads per KV head
    block_size: int

    @property
    def kernels(self) -> Mapping[str, str]:
        """The C++ name of the kernel that plays each part."""
        kind, d, g, b = TYPES[self.dtype], self.head_size, self.group, self.block_size
        names = {
            "store": f"store<{kind}, {d}, {b}>",
            "copy": "copy",
            "merge": f"merge<{kind}, {d}>",
        }
        if self.on_tensor_cores:
            names["decode"] = f"decode<{kind}, {d}, {g}, {b}>"
            names["prefill"] = f"prefill<{kind}, {d}, {g}, {b}, {self._row_tiles}>"
        else:
            names["decode"] = names["prefill"] = f"plain<{d}, {g}, {b}>"
        return names

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
