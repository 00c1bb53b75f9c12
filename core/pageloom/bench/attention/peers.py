"""Kernels outside Pageloom, on keys and values that lie contiguously: what paging has to match.

They follow the contract of a backend, so that they are prepared, checked and timed like all
others, but are not registered: each sequence has one block of ``max_model_len`` tokens.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from pageloom.contract import AttentionBackend, AttentionBatch, AttentionSpec, KVQuantizer


@dataclass(frozen=True, slots=True)
class Group:
    """Neighbors in the batch, with equal numbers of query tokens and equal contexts."""

    rows: slice  # of q and out
    slabs: slice  # of the cache
    query: int
    length: int


class Contiguous(AttentionBackend):
    """K and V are ``[num_blocks, num_kv_heads, max_model_len, head_size]`` per layer."""

    supports_cuda_graphs = True  # here, where each step has a graph of its own

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        return "stores the model's dtype only" if spec.quantizer else None

    @classmethod
    def block_size(cls, requested: int | None, max_model_len: int) -> int:
        if requested not in (None, max_model_len):
            raise ValueError(f"it is contiguous: one block of {max_model_len} tokens per sequence")
        return max_model_len

    def bytes_per_block(self) -> int:
        size = 2 * self.spec.block_size * self.spec.dtype.itemsize
        return sum(size * layer.num_kv_heads * layer.head_size for layer in self.spec.layers)

    def allocate(self, num_blocks: int) -> None:
        self.cache = [
            torch.zeros(
                (2, num_blocks, layer.num_kv_heads, self.spec.block_size, layer.head_size),
                dtype=self.spec.dtype,
                device=self.spec.device,
            )
            for layer in self.spec.layers
        ]

    def plan(self, batch: AttentionBatch) -> None:
        self._slabs = batch.slots // self.spec.block_size
        self._offsets = batch.slots % self.spec.block_size
        self.groups = self._group(batch)

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        keys, values = self.cache[layer]
        keys[self._slabs, :, self._offsets] = k
        values[self._slabs, :, self._offsets] = v
        for group in self.groups:
            batched = (-1, group.query, *q.shape[1:])
            mine = q[group.rows].unflatten(0, batched[:2]).transpose(1, 2)
            seen = group.slabs, slice(None), slice(group.length)
            scale = self.spec.layers[layer].scale
            result = self.attend(mine, keys[seen], values[seen], group, scale)
            out[group.rows].view(batched).copy_(result.transpose(1, 2))

    @abstractmethod
    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, scale: float
    ) -> torch.Tensor:
        """Causal attention of the last tokens ``q [b, num_heads, query, head_size]`` over ``k``
        and ``v [b, num_kv_heads, length, head_size]``."""

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        for cache in self.cache:
            for source, target in pairs:
                cache[:, target] = cache[:, source]

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        raise NotImplementedError("a peer does not swap")

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        raise NotImplementedError("a peer does not swap")

    def _group(self, batch: AttentionBatch) -> list[Group]:
        starts, lengths = batch.query_start_host.tolist(), batch.seq_lens_host.tolist()
        slabs = batch.block_tables[:, 0].tolist()
        groups: list[Group] = []
        for i, (slab, length) in enumerate(zip(slabs, lengths, strict=True)):
            query = starts[i + 1] - starts[i]
            last = groups[-1] if groups else None
            if last and (last.query, last.length, last.slabs.stop) == (query, length, slab):
                groups[-1] = Group(
                    slice(last.rows.start, starts[i + 1]),
                    slice(last.slabs.start, slab + 1),
                    query,
                    length,
                )
            else:
                rows = slice(starts[i], starts[i + 1])
                groups.append(Group(rows, slice(slab, slab + 1), query, length))
        return groups


class SDPA(Contiguous):
    """`torch.nn.functional.scaled_dot_product_attention`, one call per `Group`."""

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        self._masks: dict[tuple[int, int], torch.Tensor] = {}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, scale: float
    ) -> torch.Tensor:
        whole = group.query == group.length
        mask = None if whole or group.query == 1 else self._mask(group)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=whole and group.query > 1,
            scale=scale,
            enable_gqa=True,
        )

    def _mask(self, group: Group) -> torch.Tensor:
        """For the last tokens of a longer context."""
        key = group.query, group.length
        if key not in self._masks:
            if self.spec.device.type == "cuda":
                from torch.nn.attention.bias import causal_lower_right

                # Not a tensor of scores, but a flag that the fused kernels understand.
                self._masks[key] = causal_lower_right(*key)
            else:
                ones = torch.ones(key, dtype=torch.bool, device=self.spec.device)
                self._masks[key] = ones.tril(group.length - group.query)
        return self._masks[key]


class Flex(Contiguous):
    """PyTorch's FlexAttention, compiled, one call per `Group`."""

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        from torch.nn.attention.flex_attention import flex_attention

        super().__init__(config, spec, quantizer)
        # Past a limit of shapes, compiled functions run uncompiled: let each case start anew.
        torch._dynamo.reset()
        self._attend: Callable[..., Any] = torch.compile(flex_attention, dynamic=False)
        self._masks: dict[tuple[int, int], Any] = {}

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, group: Group, scale: float
    ) -> torch.Tensor:
        mask = None if group.query == 1 else self._mask(group)
        result: torch.Tensor = self._attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=True)
        return result

    def _mask(self, group: Group) -> Any:
        from torch.nn.attention.flex_attention import create_block_mask

        key = group.query, group.length
        if key not in self._masks:
            before = group.length - group.query
            self._masks[key] = create_block_mask(
                lambda batch, head, query, token: token <= query + before,
                None,
                None,
                *key,
                device=str(self.spec.device),
            )
        return self._masks[key]


PEERS: dict[str, type[AttentionBackend]] = {"sdpa": SDPA, "flex": Flex}
