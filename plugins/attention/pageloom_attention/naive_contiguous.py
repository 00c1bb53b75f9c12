"""The baseline: every branch reserves one slab of ``max_model_len`` tokens.

This is how inference worked before paging, and what the waste that the PagedAttention paper
(Kwon et al., SOSP 2023, section 3.1) reports is measured on. As one block is one slab, the same
block pool, scheduler and reports serve it unchanged.
"""

from __future__ import annotations

from typing import Any

import torch

from pageloom.contract import AttentionBatch, AttentionSpec, KVQuantizer
from pageloom_attention.attend import CausalMasks, attend_decodes, attend_prefill, seen_tokens
from pageloom_attention.cache import KINDS, CachedAttention


class NaiveContiguous(CachedAttention):
    """Attends sequence by sequence over a view of its slab; nothing is gathered."""

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        self._masks = CausalMasks(spec.dtype, spec.device)
        self._sequences: list[tuple[int, int, int, int]] = []

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.block_size != spec.max_model_len:
            return _slab_is_the_block(spec.block_size, spec.max_model_len)
        return super().check(spec)

    @classmethod
    def block_size(cls, requested: int | None, max_model_len: int) -> int:
        if requested not in (None, max_model_len):
            raise ValueError(f"naive_contiguous {_slab_is_the_block(requested, max_model_len)}")
        return max_model_len

    def plan(self, batch: AttentionBatch) -> None:
        self.plan_store(batch.slots)
        starts = batch.query_start_host.tolist()
        slabs = batch.block_tables[:, 0].tolist()
        lengths = batch.seq_lens_host.tolist()
        self._sequences = list(zip(slabs, starts[:-1], starts[1:], lengths, strict=True))

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.store(layer, k, v)
        spec, slabs = self.spec.layers[layer], self.blocks(layer)
        for slab, start, end, length in self._sequences:
            seen = slice(length - seen_tokens(spec, length, end - start), length)
            keys, values = (
                self.decode(slabs[i, slab, :, seen], layer, kind) for i, kind in enumerate(KINDS)
            )
            mine, to = q[start:end], out[start:end]
            if end - start == 1:
                to.copy_(attend_decodes(mine, keys[None], values[None], spec, None, sinks))
            else:
                attend_prefill(mine, keys, values, to, spec, self._masks, sinks)


def _slab_is_the_block(block_size: int | None, max_model_len: int) -> str:
    return (
        f"reserves one block of max_model_len = {max_model_len} tokens per branch, "
        f"not blocks of {block_size}: leave kv_cache.block_size out"
    )
