"""FlashInfer (Ye et al., MLSys 2025), by its interface for paged KV caches."""

from __future__ import annotations

from typing import Any

import torch

from pageloom.contract import AttentionBatch, AttentionSpec, KVQuantizer
from pageloom_peers.paged import PagedPeer

HEAD_SIZES = (64, 128, 256)
WORKSPACE = 128 << 20  # bytes, as its documentation recommends


class FlashInfer(PagedPeer):
    """One wrapper per kind of layer, since a plan holds for one kind: decodes and prefills together
    by `BatchPrefillWithPagedKVCacheWrapper`, which picks the kernel for this GPU itself."""

    distribution = "flashinfer-python"
    oldest = (0, 2)

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        import flashinfer

        # Shared: layers run one after the other.
        workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=spec.device)
        self._wrappers = {
            layer: flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
            for layer in dict.fromkeys(spec.layers)
        }

    @classmethod
    def beyond(cls, spec: AttentionSpec) -> str | None:
        for layer in spec.layers:
            if layer.head_size not in HEAD_SIZES:
                return f"supports head sizes 64, 128 and 256, not {layer.head_size}"
        return cls.beyond_both(spec)

    def plan(self, batch: AttentionBatch) -> None:
        self.plan_store(batch)
        # The block tables without padding, one after the other. Where they lie is worked out on
        # the host, so that nothing waits for the GPU.
        size = self.spec.block_size
        counts = (batch.seq_lens_host + size - 1) // size
        indptr = torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=torch.int32)])
        rows = torch.repeat_interleave(torch.arange(batch.num_seqs), counts)
        columns = torch.arange(len(rows)) - indptr[rows]
        where = torch.stack([rows, columns]).to(self.spec.device, non_blocking=True)
        indices = batch.block_tables[where[0], where[1]]
        last_page_len = (batch.seq_lens_host - 1) % size + 1
        for layer, wrapper in self._wrappers.items():
            wrapper.plan(
                batch.query_start_host,
                indptr,
                indices,
                last_page_len,
                layer.num_heads,
                layer.num_kv_heads,
                layer.head_size,
                size,
                causal=True,
                sm_scale=layer.scale,
                # Inclusive, and without the token itself.
                window_left=-1 if layer.window is None else layer.window - 1,
                logits_soft_cap=layer.softcap,
                q_data_type=self.spec.dtype,
                kv_data_type=self.spec.dtype,
            )

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
        # What it says of strides is nothing, so q and its result are contiguous.
        wrapper = self._wrappers[self.spec.layers[layer]]
        out.copy_(wrapper.run(q.contiguous(), self.cache[layer]))
