"""The KV cache that the torch backends share: one tensor per layer, one row per vector."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch

from pageloom.contract import AttentionBackend, AttentionSpec, KVQuantizer

Kind = Literal["k", "v"]
KINDS: tuple[Kind, Kind] = ("k", "v")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class CachedAttention(AttentionBackend):
    """An `AttentionBackend` less its attention: stores, gathers, copies and swaps blocks.

    A layer's cache is ``[2, rows, width]``, K and V. The vector of head h in slot o of block b is
    row ``(b * num_kv_heads + h) * block_size + o``, so a head's vectors lie together, which is how
    attention reads them. ``width`` is the head size, or with a quantizer the bytes of one coded
    vector. The row behind them all belongs to no block and holds the zero vector: an index points
    there where a sequence has no token, so what unwritten slots hold never enters the arithmetic.
    Rows that nobody uses make their number a multiple of 16, so that V is as aligned as K.
    """

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        self.num_blocks = 0
        self.cache: list[torch.Tensor] = []
        self._dtype = torch.uint8 if quantizer else spec.dtype
        # The cache again, split into K and V once: splitting costs microseconds in every call.
        self._halves: list[tuple[torch.Tensor, ...]] = []
        self._workspaces = [torch.empty(0, dtype=self._dtype, device=spec.device) for _ in KINDS]
        self._store_rows: dict[int, torch.Tensor] = {}

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.dtype not in DTYPES:
            return f"computes in {', '.join(map(_name, DTYPES))}, not {_name(spec.dtype)}"
        return None

    def bytes_per_block(self) -> int:
        vectors = 2 * self.spec.block_size * self._dtype.itemsize
        return sum(vectors * s.num_kv_heads * self._width(s.head_size) for s in self.spec.layers)

    def allocate(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        for layer, spec in enumerate(self.spec.layers):
            zero_row = self.zero_row(spec.num_kv_heads)
            shape = (2, zero_row // 16 * 16 + 16, self._width(spec.head_size))
            # Left as it is: a cache of gigabytes takes memory only as its blocks are written.
            cache = torch.empty(shape, dtype=self._dtype, device=self.spec.device)
            zero = torch.zeros(spec.head_size, dtype=self.spec.dtype, device=self.spec.device)
            for half, kind in zip(cache, KINDS, strict=True):
                half[zero_row] = self._encode(zero, layer, kind)
            self.cache.append(cache)
            self._halves.append(cache.unbind())

    def blocks(self, layer: int) -> torch.Tensor:
        """A layer's cache as ``[2, num_blocks, num_kv_heads, block_size, width]``, a view."""
        cache, heads = self.cache[layer], self.spec.layers[layer].num_kv_heads
        shape = (2, self.num_blocks, heads, self.spec.block_size, cache.shape[-1])
        return cache[:, : self.zero_row(heads)].view(shape)

    def rows(self, slots: torch.Tensor, num_kv_heads: int) -> torch.Tensor:
        """Cache rows of slots: int64 ``[..., n]`` to ``[..., num_kv_heads, n]``."""
        size = self.spec.block_size
        first = slots // size * (size * num_kv_heads) + slots % size
        heads = torch.arange(num_kv_heads, device=slots.device).unsqueeze(1) * size
        return first.unsqueeze(-2) + heads

    def zero_row(self, num_kv_heads: int) -> int:
        """The row that holds the zero vector in a layer with this many KV heads."""
        return self.num_blocks * num_kv_heads * self.spec.block_size

    def plan_store(self, slots: torch.Tensor) -> None:
        """Prepare `store` for one step, whose tokens go to ``slots`` (int64 ``[T]``)."""
        heads = {s.num_kv_heads for s in self.spec.layers}
        self._store_rows = {h: self.rows(slots, h).T for h in heads}

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Put this step's K and V, each ``[T, num_kv_heads, head_size]``, into their slots."""
        rows = self._store_rows[self.spec.layers[layer].num_kv_heads]
        for half, x, kind in zip(self._halves[layer], (k, v), KINDS, strict=True):
            half.index_put_((rows,), self._encode(x, layer, kind))

    def gather(self, layer: int, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V at ``rows`` (int64, contiguous), each ``[*rows.shape, head_size]``.

        They lie in a workspace that the next `gather` overwrites.
        """
        index, width = rows.view(-1), self.cache[layer].shape[-1]
        size = len(index) * width
        if size > len(self._workspaces[0]):
            self._workspaces = [space.new_empty(size) for space in self._workspaces]
        found = []
        for half, space, kind in zip(self._halves[layer], self._workspaces, KINDS, strict=True):
            data = space[:size].view(-1, width)
            torch.index_select(half, 0, index, out=data)
            found.append(self.decode(data.view(*rows.shape, width), layer, kind))
        return found[0], found[1]

    def decode(self, data: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        """What ``data [..., width]`` from the cache stands for: ``[..., head_size]``."""
        if self.quantizer is None:
            return data
        return self.quantizer.decode(data, layer, kind, self.spec.dtype)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = (self._indices([pair[i] for pair in pairs]) for i in (0, 1))
        for layer in range(len(self.cache)):
            blocks = self.blocks(layer)
            blocks[:, targets] = blocks[:, sources]

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        index = self._indices(blocks)
        layers = range(len(self.cache))
        parts = [self.blocks(i)[:, index].transpose(0, 1).flatten(1) for i in layers]
        return torch.cat(parts, 1).view(torch.uint8).cpu()

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        index = self._indices(blocks)
        caches = [self.blocks(layer) for layer in range(len(self.cache))]
        flat = data.to(self.spec.device).view(self._dtype)
        parts = torch.split(flat, [cache[:, 0].numel() for cache in caches], dim=1)
        for cache, part in zip(caches, parts, strict=True):
            cache[:, index] = part.view(-1, 2, *cache.shape[2:]).transpose(0, 1)

    def _width(self, head_size: int) -> int:
        return self.quantizer.bytes_per_vector(head_size) if self.quantizer else head_size

    def _encode(self, x: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        return self.quantizer.encode(x, layer, kind) if self.quantizer else x

    def _indices(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks, dtype=torch.int64, device=self.spec.device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
