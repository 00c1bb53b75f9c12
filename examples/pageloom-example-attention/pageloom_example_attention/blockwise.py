"""Attention block by block: the KV cache is read as it lies, and scores are never all in memory.

The softmax is computed in one pass, by a running maximum and sum (Milakov and Gimelshein, "Online
normalizer calculation for softmax", 2018), as FlashAttention does on a GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pageloom.contract import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVQuantizer,
    LayerSpec,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Blockwise(AttentionBackend):
    """Computes in float32, on any device.

    A layer's cache is ``[num_blocks, 2, num_kv_heads, block_size, width]``, where ``width`` is the
    head size, or with a KV format the bytes of one coded vector. So a block is one piece of memory,
    which makes copying and swapping simple.
    """

    @dataclass
    class Config:
        blocks_per_tile: int = 16
        """KV blocks that are attended to in one product."""

        def __post_init__(self) -> None:
            if self.blocks_per_tile < 1:
                raise ValueError(f"blocks_per_tile must be at least 1, not {self.blocks_per_tile}")

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        self._dtype = torch.uint8 if quantizer else spec.dtype
        self._cache: list[torch.Tensor] = []

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.dtype not in DTYPES:
            return f"computes in float32, bfloat16 and float16, not {spec.dtype}"
        return None

    def bytes_per_block(self) -> int:
        return sum(self._block_elements(s) * self._dtype.itemsize for s in self.spec.layers)

    def allocate(self, num_blocks: int) -> None:
        for spec in self.spec.layers:
            shape = (num_blocks, 2, spec.num_kv_heads, self.spec.block_size, self._width(spec))
            self._cache.append(torch.empty(shape, dtype=self._dtype, device=self.spec.device))

    def plan(self, batch: AttentionBatch) -> None:
        self._blocks = batch.slots // self.spec.block_size
        self._offsets = batch.slots % self.spec.block_size
        self._tables = batch.block_tables.long()
        self._starts = batch.query_start_host.tolist()
        self._lengths = batch.seq_lens_host.tolist()

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        # All of the step first: a sequence may read blocks that another one writes.
        for half, (x, kind) in enumerate(((k, "k"), (v, "v"))):
            coded = self.quantizer.encode(x, layer, kind) if self.quantizer else x
            self._cache[layer][self._blocks, half, :, self._offsets] = coded
        for i, length in enumerate(self._lengths):
            mine = slice(self._starts[i], self._starts[i + 1])
            out[mine] = self._attend(layer, q[mine], self._tables[i], length, sinks).to(out.dtype)

    def _attend(
        self,
        layer: int,
        q: torch.Tensor,
        table: torch.Tensor,
        length: int,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of a sequence's last tokens ``q [n, num_heads, head_size]``."""
        spec, size, device = self.spec.layers[layer], self.spec.block_size, q.device
        n, heads = len(q), (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        # The query heads of a KV head are rows of one product: [num_kv_heads, rows, head_size].
        rows = q.float().view(n, *heads, -1).permute(1, 2, 0, 3).flatten(1, 2)
        positions = torch.arange(length - n, length, device=device).repeat(heads[1]).unsqueeze(1)
        # Of the weights so far: the largest score, their sum, and the values that they weigh.
        highest = rows.new_full((*rows.shape[:2], 1), torch.finfo(torch.float32).min)
        total, result = torch.zeros_like(highest), torch.zeros_like(rows)
        if sinks is not None:
            highest = sinks.float().view(*heads, 1).expand(-1, -1, n).reshape(highest.shape)
            total = torch.ones_like(highest)
        oldest = 0 if spec.window is None else max(0, length - n - spec.window + 1)
        for first in range(oldest // size, -(-length // size), self.config.blocks_per_tile):
            keys, values = self._load(layer, table[first : first + self.config.blocks_per_tile])
            at = torch.arange(keys.shape[1], device=device) + first * size
            # What was never written may be NaN, and NaN times a weight of zero is NaN.
            values = values.masked_fill((at >= length).unsqueeze(1), 0)
            scores = rows @ keys.transpose(1, 2) * spec.scale
            if spec.softcap is not None:
                scores = spec.softcap * torch.tanh(scores / spec.softcap)
            hidden = at > positions
            if spec.window is not None:
                hidden |= at <= positions - spec.window
            scores = scores.masked_fill(hidden, -torch.inf)
            before, highest = highest, torch.maximum(highest, scores.amax(-1, keepdim=True))
            shrink, weights = torch.exp(before - highest), torch.exp(scores - highest)
            total = total * shrink + weights.sum(-1, keepdim=True)
            result = result * shrink + weights @ values
        return (result / total).view(*heads, n, -1).permute(2, 0, 1, 3).flatten(1, 2)

    def _load(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some blocks, side by side: float32 ``[num_kv_heads, tokens, head_size]``."""
        data = self._cache[layer][blocks].permute(1, 2, 0, 3, 4).flatten(2, 3)
        if self.quantizer is None:
            return data[0].float(), data[1].float()
        return (
            self.quantizer.decode(data[0], layer, "k", self.spec.dtype).float(),
            self.quantizer.decode(data[1], layer, "v", self.spec.dtype).float(),
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = zip(*pairs, strict=True)
        for cache in self._cache:
            cache[list(targets)] = cache[list(sources)]

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        parts = [cache[list(blocks)].flatten(1) for cache in self._cache]
        return torch.cat(parts, dim=1).view(torch.uint8).cpu()

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        sizes = [self._block_elements(spec) for spec in self.spec.layers]
        parts = data.view(self._dtype).to(self.spec.device).split(sizes, dim=1)
        for cache, part in zip(self._cache, parts, strict=True):
            cache[list(blocks)] = part.view(-1, *cache.shape[1:])

    def _block_elements(self, spec: LayerSpec) -> int:
        return 2 * spec.num_kv_heads * self.spec.block_size * self._width(spec)

    def _width(self, spec: LayerSpec) -> int:
        return self.quantizer.bytes_per_vector(spec.head_size) if self.quantizer else spec.head_size
