"""Paged attention in plain torch: gather by block table, then `scaled_dot_product_attention`.

Runs on any device and supports everything that a model or a KV format may ask for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from pageloom.contract import AttentionBatch, AttentionSpec, KVQuantizer, LayerSpec
from pageloom_attention.attend import CausalMasks, attend_decodes, attend_prefill, seen_tokens
from pageloom_attention.cache import CachedAttention

VECTOR = 16  # float32 elements in the widest CPU vector


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context length, attended over in one call."""

    queries: torch.Tensor  # int64 [b], rows of q
    rows: torch.Tensor  # int64 [b, num_kv_heads, columns], cache rows
    mask: torch.Tensor  # [b, 1, 1, columns], 0 or -inf


@dataclass(frozen=True, slots=True)
class Prefill:
    """A sequence with several query tokens, rows ``start : end`` of q."""

    start: int
    end: int
    rows: torch.Tensor | None  # int64 [num_kv_heads, seen]; None: this step computes all of it


@dataclass(frozen=True, slots=True)
class LayerPlan:
    """What one step has to do in every layer of the same shape."""

    decodes: list[DecodeGroup]
    prefills: list[Prefill]


class TorchPaged(CachedAttention):
    """Gathers the vectors that a call needs into a workspace, then attends over that.

    Decodes are grouped by length, so that few calls are needed and little padding is computed.
    """

    auto_rank = 10

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        self._masks = CausalMasks(spec.dtype, spec.device)
        self._plans: dict[tuple[int, int, int | None], LayerPlan] = {}
        # On a CPU one more call costs as much as some 256 tokens of padding, and a workspace is
        # fast while the L2 caches hold it. A GPU is starved by small calls.
        on_cpu = spec.device.type == "cpu"
        self._call_cost = 256 if on_cpu else 1 << 16
        self._workspace_bytes = 1 << (22 if on_cpu else 29)

    def plan(self, batch: AttentionBatch) -> None:
        self.plan_store(batch.slots)
        self._plans = {}
        for layer in self.spec.layers:
            if _shape(layer) not in self._plans:
                self._plans[_shape(layer)] = self._plan_layers(batch, layer)

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
        self.decode_all(layer, q, out, sinks)
        spec = self.spec.layers[layer]
        for prefill in self._plans[_shape(spec)].prefills:
            mine = slice(prefill.start, prefill.end)
            if prefill.rows is None:
                keys, values = k[mine].transpose(0, 1), v[mine].transpose(0, 1)
            else:
                keys, values = self.gather(layer, prefill.rows)
            attend_prefill(q[mine], keys, values, out[mine], spec, self._masks, sinks)

    def decode_all(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        """Attend for the sequences with one query token, which are the first rows of ``q``."""
        spec = self.spec.layers[layer]
        for group in self._plans[_shape(spec)].decodes:
            keys, values = self.gather(layer, group.rows)
            queries = q.index_select(0, group.queries)
            result = attend_decodes(queries, keys, values, spec, group.mask, sinks)
            out.index_copy_(0, group.queries, result)

    def plan_decodes(
        self, batch: AttentionBatch, layer: LayerSpec, seen: list[int]
    ) -> list[DecodeGroup]:
        """What `decode_all` needs in layers like ``layer``; ``seen`` is tokens per sequence."""
        token_bytes = 2 * layer.num_kv_heads * layer.head_size * self.spec.dtype.itemsize
        most_tokens = self._workspace_bytes // token_bytes
        groups = group_by_length(seen[: batch.num_decodes], self._call_cost, most_tokens)
        return [self._plan_group(batch, group, seen, layer) for group in groups]

    def _plan_layers(self, batch: AttentionBatch, layer: LayerSpec) -> LayerPlan:
        lengths, counts = batch.seq_lens_host.tolist(), batch.query_start_host.diff().tolist()
        seen = [seen_tokens(layer, *both) for both in zip(lengths, counts, strict=True)]
        return LayerPlan(
            self.plan_decodes(batch, layer, seen),
            [
                self._plan_prefill(batch, i, seen, layer)
                for i in range(batch.num_decodes, batch.num_seqs)
            ],
        )

    def _plan_group(
        self, batch: AttentionBatch, members: list[int], seen: list[int], layer: LayerSpec
    ) -> DecodeGroup:
        # Whole vectors of columns: the sums of a sequence are then formed in the same order
        # whatever it is padded to, and rarely depend on its neighbours.
        columns = -(-max(seen[i] for i in members) // VECTOR) * VECTOR
        rows, hidden = self._gather_rows(batch, members, seen, columns, layer.num_kv_heads)
        mask = torch.zeros(hidden.shape, dtype=self.spec.dtype, device=self.spec.device)
        mask.masked_fill_(hidden, -torch.inf)
        # A decode comes before every longer query, so sequence i has row i of q.
        queries = torch.tensor(members, device=self.spec.device)
        return DecodeGroup(queries, rows, mask[:, None, None])

    def _plan_prefill(
        self, batch: AttentionBatch, member: int, seen: list[int], layer: LayerSpec
    ) -> Prefill:
        start, end = batch.query_start_host[member : member + 2].tolist()
        # What this step computed will do for a sequence that begins in it, unless storing it
        # loses precision: then this step must see what later steps will.
        if end - start == int(batch.seq_lens_host[member]) and self.quantizer is None:
            return Prefill(start, end, None)
        rows, _ = self._gather_rows(batch, [member], seen, seen[member], layer.num_kv_heads)
        return Prefill(start, end, rows[0])

    def _gather_rows(
        self,
        batch: AttentionBatch,
        members: list[int],
        seen: list[int],
        columns: int,
        num_kv_heads: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Where the last ``seen[i]`` tokens of each member i lie.

        Returns cache rows, int64 ``[len(members), num_kv_heads, columns]``, and which columns are
        past a sequence's end, bool ``[len(members), columns]``; those are given the zero row.
        """
        device, size = self.spec.device, self.spec.block_size
        index = torch.tensor(members, device=device)
        counts = torch.tensor([seen[i] for i in members], device=device).unsqueeze(1)
        column = torch.arange(columns, device=device)
        hidden = column >= counts
        positions = batch.seq_lens[index].unsqueeze(1) - counts + column
        positions.masked_fill_(hidden, 0)
        blocks = batch.block_tables[index].gather(1, (positions // size).long())
        rows = self.rows(blocks.long() * size + positions % size, num_kv_heads)
        return rows.masked_fill_(hidden.unsqueeze(1), self.zero_row(num_kv_heads)), hidden


def group_by_length(lengths: Sequence[int], call_cost: int, most_tokens: int) -> list[list[int]]:
    """Partition sequences into groups that are each padded to their longest member.

    ``call_cost`` is how many tokens of padding a group may have in total, ``most_tokens`` how
    many tokens it may have with its padding, unless one sequence alone has more. Returns indices
    into ``lengths``, longest first.
    """
    groups: list[list[int]] = []
    padding = longest = 0
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padding += longest - lengths[i]
        if not groups or padding > call_cost or longest * (len(groups[-1]) + 1) > most_tokens:
            groups.append([])
            padding, longest = 0, lengths[i]
        groups[-1].append(i)
    return groups


def _shape(layer: LayerSpec) -> tuple[int, int, int | None]:
    return layer.num_kv_heads, layer.head_size, layer.window
