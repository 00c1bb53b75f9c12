"""What both backends share: the cache, and what is missing to use them."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from importlib import metadata
from typing import ClassVar

import torch

from pageloom.contract import AttentionBackend, AttentionBatch, AttentionSpec


class PagedPeer(AttentionBackend):
    """A layer's cache is ``[num_blocks, 2, block_size, num_kv_heads, head_size]``, which both
    libraries call NHD."""

    distribution: ClassVar[str]  # on PyPI
    oldest: ClassVar[tuple[int, int]]  # version

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        return cls.missing(spec) or cls.beyond(spec)

    @classmethod
    def missing(cls, spec: AttentionSpec) -> str | None:
        """What this machine lacks."""
        needed = f"{cls.distribution} {'.'.join(map(str, cls.oldest))} or newer"
        try:
            installed = metadata.version(cls.distribution)
        except metadata.PackageNotFoundError:
            return f"needs {needed}: pip install {cls.distribution}"
        if tuple(map(int, re.findall(r"\d+", installed)[:2])) < cls.oldest:
            return f"needs {needed}, not {installed}"
        if spec.device.type != "cuda" or torch.version.cuda is None:
            return f"needs an NVIDIA GPU, not {spec.device}"
        if not torch.cuda.is_available():
            return "needs an NVIDIA GPU, and torch sees none"
        capability = torch.cuda.get_device_capability(spec.device)
        if capability < (8, 0):
            return f"needs compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
        return None

    @classmethod
    @abstractmethod
    def beyond(cls, spec: AttentionSpec) -> str | None:
        """What of ``spec`` the kernels cannot do."""

    @staticmethod
    def beyond_both(spec: AttentionSpec) -> str | None:
        if spec.dtype not in (torch.float16, torch.bfloat16):
            return f"computes in float16 and bfloat16, not {spec.dtype}"
        if spec.quantizer is not None:
            return "stores the model's dtype only"
        if any(layer.sinks for layer in spec.layers):
            return "has no sinks"
        return None

    def bytes_per_block(self) -> int:
        size = 2 * self.spec.block_size * self.spec.dtype.itemsize
        return sum(size * s.num_kv_heads * s.head_size for s in self.spec.layers)

    def allocate(self, num_blocks: int) -> None:
        self.cache = [
            torch.empty(
                (num_blocks, 2, self.spec.block_size, s.num_kv_heads, s.head_size),
                dtype=self.spec.dtype,
                device=self.spec.device,
            )
            for s in self.spec.layers
        ]

    def plan_store(self, batch: AttentionBatch) -> None:
        self._blocks = batch.slots // self.spec.block_size
        self._offsets = batch.slots % self.spec.block_size

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.cache[layer][self._blocks, 0, self._offsets] = k
        self.cache[layer][self._blocks, 1, self._offsets] = v

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*pairs, strict=True)
        for cache in self.cache:
            cache[list(targets)] = cache[list(sources)]

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        parts = [cache[list(blocks)].flatten(1) for cache in self.cache]
        return torch.cat(parts, dim=1).view(torch.uint8).cpu()

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        sizes = [cache[0].numel() for cache in self.cache]
        parts = data.view(self.spec.dtype).to(self.spec.device).split(sizes, dim=1)
        for cache, part in zip(self.cache, parts, strict=True):
            cache[list(blocks)] = part.view(-1, *cache.shape[1:])
