"""A backend that CUDA graphs can hold, in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pageloom.contract import AttentionBackend


class StaticAttention(AttentionBackend):
    """Every token attends over all slots that its block table could have, masked: what is computed
    has the same shapes whatever the lengths are."""

    supports_cuda_graphs = True

    @classmethod
    def check(cls, spec):
        return None

    def bytes_per_block(self):
        size = 2 * self.spec.block_size * self.spec.dtype.itemsize
        return sum(size * layer.num_kv_heads * layer.head_size for layer in self.spec.layers)

    def allocate(self, num_blocks):
        slots = num_blocks * self.spec.block_size
        self.cache = [
            torch.full((2, slots, layer.num_kv_heads, layer.head_size), torch.nan)
            for layer in self.spec.layers
        ]

    def plan(self, batch):
        self.batch = batch
        self.tables, self.limits = batch.block_tables, batch.seq_lens
        if batch.max_query_len > 1:
            counts = batch.query_start.diff()
            rows = torch.arange(batch.num_seqs).repeat_interleave(counts)
            self.tables = self.tables[rows]
            behind = batch.query_start[1:][rows] - torch.arange(batch.num_tokens) - 1
            self.limits = self.limits[rows] - behind

    def forward(self, layer, q, k, v, out, sinks=None):
        keys, values = self.cache[layer]
        keys[self.batch.slots], values[self.batch.slots] = k, v
        size = self.spec.block_size
        slots = (self.tables.long()[:, :, None] * size + torch.arange(size)).flatten(1)
        seen = torch.arange(slots.shape[1]) < self.limits[:, None]
        mask = seen[:, :, None, None]
        k, v = (x[slots].where(mask, 0).transpose(1, 2) for x in (keys, values))
        attended = F.scaled_dot_product_attention(
            q[:, :, None],
            k,
            v,
            attn_mask=seen[:, None, None],
            scale=self.spec.layers[layer].scale,
            enable_gqa=True,
        )
        out.copy_(attended[:, :, 0])

    def _blocks(self):
        return [x.view(2, -1, self.spec.block_size, *x.shape[2:]) for x in self.cache]

    def copy_blocks(self, pairs):
        for blocks in self._blocks():
            for source, target in pairs:
                blocks[:, target] = blocks[:, source]

    def read_blocks(self, blocks):
        parts = [kv[:, blocks].transpose(0, 1).flatten(1) for kv in self._blocks()]
        return torch.cat(parts, 1).contiguous().view(torch.uint8)

    def write_blocks(self, blocks, data):
        flat = data.view(self.spec.dtype)
        sizes = [kv[:, 0].numel() for kv in self._blocks()]
        for kv, part in zip(self._blocks(), flat.split(sizes, 1), strict=True):
            kv[:, blocks] = part.view(-1, 2, *kv.shape[2:]).transpose(0, 1)
