"""FlashAttention 2 (Dao, 2023), by its interface for paged KV caches."""

from __future__ import annotations

from typing import Any

import torch

from pageloom.contract import AttentionBatch, AttentionSpec, KVQuantizer
from pageloom_peers.paged import PagedPeer

PAGE = 256  # "page_block_size must be a multiple of 256"


class FlashAttention(PagedPeer):
    """Decodes by `flash_attn_with_kvcache`, which splits long contexts over the chip, everything
    else by `flash_attn_varlen_func`."""

    distribution = "flash-attn"
    oldest = (2, 6)  # the first with softcap

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        import flash_attn

        self._decode = flash_attn.flash_attn_with_kvcache
        self._prefill = flash_attn.flash_attn_varlen_func

    @classmethod
    def beyond(cls, spec: AttentionSpec) -> str | None:
        if spec.block_size % PAGE:
            return f"needs blocks of a multiple of {PAGE} tokens, not {spec.block_size}"
        for layer in spec.layers:
            if layer.head_size > 256 or layer.head_size % 8:
                return f"supports head sizes up to 256, multiples of 8, not {layer.head_size}"
        return cls.beyond_both(spec)

    @classmethod
    def block_size(cls, requested: int | None, max_model_len: int) -> int:
        if requested is not None and requested % PAGE:
            raise ValueError(f"flash_attn needs blocks of a multiple of {PAGE} tokens")
        return requested or PAGE

    def plan(self, batch: AttentionBatch) -> None:
        self.plan_store(batch)
        self._batch = batch
        # The other sequences, as a batch of their own. Decodes have one query token each, so the
        # first of the others has the row of q that equals the number of decodes.
        decodes = batch.num_decodes
        self._query_start = batch.query_start[decodes:] - decodes
        zero = batch.seq_lens.new_zeros(1)
        ends = batch.seq_lens[decodes:].cumsum(0, dtype=torch.int32)
        self._key_start = torch.cat([zero, ends])

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
        batch, spec, decodes = self._batch, self.spec.layers[layer], self._batch.num_decodes
        keys, values = self.cache[layer].unbind(1)
        options: dict[str, Any] = {
            "softmax_scale": spec.scale,
            "causal": True,
            # Inclusive, and without the token itself.
            "window_size": (-1, -1) if spec.window is None else (spec.window - 1, 0),
            "softcap": spec.softcap or 0.0,
        }
        if decodes:
            out[:decodes] = self._decode(
                q[:decodes].unsqueeze(1),
                keys,
                values,
                cache_seqlens=batch.seq_lens[:decodes],
                block_table=batch.block_tables[:decodes],
                **options,
            ).squeeze(1)
        if decodes < batch.num_seqs:
            out[decodes:] = self._prefill(
                q[decodes:],
                keys,
                values,
                cu_seqlens_q=self._query_start,
                cu_seqlens_k=self._key_start,
                max_seqlen_q=batch.max_query_len,
                max_seqlen_k=batch.max_seq_len,
                block_table=batch.block_tables[decodes:],
                **options,
            )
