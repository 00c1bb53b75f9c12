"""What of `flash_attn` and `flashinfer` the backends call, slowly, as it is documented.

https://github.com/Dao-AILab/flash-attention/blob/main/flash_attn/flash_attn_interface.py
https://docs.flashinfer.ai/api/attention.html
"""

from __future__ import annotations

import math

import torch


def attend(q, k, v, scale, left, softcap):
    """Causal attention, aligned to the bottom right: ``q [n, H, D]``, ``k`` and ``v [L, Hkv, D]``;
    a token sees ``left`` tokens before it, all if that is negative."""
    k, v = (x.float().repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.float(), k) * scale
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    age = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
    hidden = (age < 0) | ((age > left) if left >= 0 else False)
    weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
    return torch.einsum("hnl,lhd->nhd", weights, v).to(q.dtype)


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    *,
    softmax_scale,
    causal,
    window_size,
    softcap,
    block_table,
):
    assert causal
    assert all(x.dtype == torch.int32 for x in (cu_seqlens_q, cu_seqlens_k, block_table))
    assert k.shape[1] % 256 == 0
    assert len(cu_seqlens_q) == len(cu_seqlens_k) == len(block_table) + 1
    assert cu_seqlens_q[0] == cu_seqlens_k[0] == 0
    assert cu_seqlens_q[-1] == len(q)
    counts, lengths = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    assert max_seqlen_q >= max(counts)
    assert max_seqlen_k >= max(lengths)
    parts = []
    for mine, length, table in zip(q.split(counts), lengths, block_table, strict=True):
        pages = table[: -(-length // k.shape[1])].long()
        keys, values = (x[pages].flatten(0, 1)[:length] for x in (k, v))
        left, right = window_size
        assert right == (-1 if left < 0 else 0)
        parts.append(attend(mine, keys, values, softmax_scale, left, softcap))
    return torch.cat(parts)


def flash_attn_with_kvcache(q, k_cache, v_cache, *, cache_seqlens, block_table, **options):
    batch, seqlen = q.shape[:2]
    assert cache_seqlens.dtype == torch.int32
    ends = torch.cat([cache_seqlens.new_zeros(1), cache_seqlens.cumsum(0, dtype=torch.int32)])
    out = flash_attn_varlen_func(
        q.flatten(0, 1),
        k_cache,
        v_cache,
        torch.arange(batch + 1, dtype=torch.int32) * seqlen,
        ends,
        seqlen,
        int(cache_seqlens.max()),
        block_table=block_table,
        **options,
    )
    return out.view(q.shape)


class BatchPrefillWithPagedKVCacheWrapper:
    def __init__(self, float_workspace_buffer, kv_layout):
        assert float_workspace_buffer.dtype == torch.uint8
        assert kv_layout == "NHD"

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal,
        sm_scale,
        window_left,
        logits_soft_cap,
        q_data_type,
        kv_data_type,
    ):
        assert causal
        given = (qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        assert all(x.dtype == torch.int32 for x in given)
        assert len(paged_kv_indices) == paged_kv_indptr[-1]
        assert ((paged_kv_last_page_len >= 1) & (paged_kv_last_page_len <= page_size)).all()
        pages = paged_kv_indptr.diff()
        self.tables = paged_kv_indices.long().split(pages.tolist())
        self.lengths = ((pages - 1) * page_size + paged_kv_last_page_len).tolist()
        self.counts = qo_indptr.diff().tolist()
        self.shapes = (num_qo_heads, head_dim_qk), (2, page_size, num_kv_heads, head_dim_qk)
        self.dtypes = q_data_type, kv_data_type
        self.options = sm_scale, window_left, logits_soft_cap or 0.0

    def run(self, q, paged_kv_cache):
        assert q.is_contiguous()
        assert (q.shape[1:], paged_kv_cache.shape[1:]) == self.shapes
        assert (q.dtype, paged_kv_cache.dtype) == self.dtypes
        parts = []
        for mine, length, table in zip(
            q.split(self.counts), self.lengths, self.tables, strict=True
        ):
            k, v = paged_kv_cache[table].transpose(0, 1).flatten(1, 2)[:, :length]
            parts.append(attend(mine, k, v, *self.options))
        return torch.cat(parts)
