"""What a KV cache must hold, in plain tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pageloom.contract import LayerSpec


@dataclass(eq=False)
class Branch:
    """A sequence of tokens and where they lie."""

    blocks: list[int] = field(default_factory=list)
    length: int = 0  # tokens whose K and V are in the cache


class Shadow:
    """What each slot of some blocks must hold, per layer and K and V; NaN if that is nothing."""

    def __init__(
        self, layers: Sequence[LayerSpec], pool: Sequence[int], size: int, dtype: torch.dtype
    ) -> None:
        self._size = size
        self._place = {block: place for place, block in enumerate(pool)}
        self._kv = [
            torch.full((2, len(pool), size, s.num_kv_heads, s.head_size), torch.nan, dtype=dtype)
            for s in layers
        ]

    def store(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        places = torch.tensor(self._places((slots // self._size).tolist()))
        self._kv[layer][0, places, slots % self._size] = k
        self._kv[layer][1, places, slots % self._size] = v

    def sequence(self, layer: int, branch: Branch) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a branch, each ``[length, num_kv_heads, head_size]``."""
        kv = self._kv[layer][:, self._places(branch.blocks)].flatten(1, 2)[:, : branch.length]
        assert not kv.isnan().any(), "a token that was never written is attended to: a faulty test"
        return kv[0], kv[1]

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = (self._places([pair[i] for pair in pairs]) for i in (0, 1))
        for kv in self._kv:
            kv[:, targets] = kv[:, sources]

    def forget(self, blocks: Sequence[int]) -> None:
        for kv in self._kv:
            kv[:, self._places(blocks)] = torch.nan

    def _places(self, blocks: Sequence[int]) -> list[int]:
        return [self._place[block] for block in blocks]
