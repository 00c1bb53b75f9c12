"""One step of a case as tensors, and a backend put in the state that the step finds.

This plays the engine's part with nothing but the contract, and gives every backend the same
numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pageloom.bench.attention.matrix import Case
from pageloom.contract import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    LayerSpec,
    VectorLayout,
)

FILL_TOKENS = 4096  # per step in which a cache is filled
CONTENTS = 4


class Workload:
    """What a case feeds to every backend.

    A step brings ``q [T, num_heads, head_size]``, ``k`` and ``v [T, num_kv_heads, head_size]``,
    the same in every layer. What the caches hold before is one of a few contents: sequence i
    begins with number ``i % CONTENTS`` of ``old_k`` and ``old_v``, which are ``[CONTENTS, tokens,
    num_kv_heads, head_size]``. Layer i has the keys rolled by i tokens, and not the values, so that
    a backend which mixes up its layers is found out.
    """

    def __init__(self, case: Case, device: torch.device, layers: int, seed: int) -> None:
        self.case, self.device, self.num_layers = case, device, layers
        self.dtype: torch.dtype = getattr(torch, case.dtype)
        self.queries = torch.tensor([query for query, _ in case.sequences])
        self.lengths = torch.tensor([length for _, length in case.sequences])
        self.old_lengths = self.lengths - self.queries
        self.layer = LayerSpec(
            case.num_heads, case.num_kv_heads, case.head_size, scale=case.head_size**-0.5
        )
        self._seed = seed
        self._generator = torch.Generator(device).manual_seed(seed)
        self.old_k, self.old_v = (
            self._normal(CONTENTS, int(self.old_lengths.max()), case.num_kv_heads, case.head_size)
            for _ in range(2)
        )
        # As in a model: slices of one matrix.
        new = int(self.queries.sum())
        heads = (case.num_heads, case.num_kv_heads, case.num_kv_heads)
        parts = self._normal(new, sum(heads) * case.head_size).split(
            [h * case.head_size for h in heads], dim=1
        )
        self.q, self.k, self.v = (
            part.view(new, h, case.head_size) for part, h in zip(parts, heads, strict=True)
        )

    def spec(self, block_size: int, layout: VectorLayout | None = None) -> AttentionSpec:
        return AttentionSpec(
            self.device,
            self.dtype,
            (self.layer,) * self.num_layers,
            block_size,
            self.case.context,
            self.case.quantizer,
            layout,
        )

    def block_tables(self, block_size: int) -> torch.Tensor:
        """int64 ``[sequences, most blocks]``, in no order, as after long service. One block per
        sequence stays in order: then there is nothing to page."""
        counts = -(-self.lengths // block_size)
        blocks = torch.arange(int(counts.sum()))
        if int(counts.max()) > 1:
            shuffle = torch.Generator().manual_seed(self._seed)
            blocks = torch.randperm(len(blocks), generator=shuffle)
        table = torch.zeros(len(counts), int(counts.max()), dtype=torch.int64)
        table[torch.arange(table.shape[1]) < counts.unsqueeze(1)] = blocks
        return table

    def old(self, layer: int, sequence: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a sequence before the step, each ``[tokens, num_kv_heads, head_size]``."""
        content, length = sequence % CONTENTS, int(self.old_lengths[sequence])
        return self.old_k[content].roll(layer, 0)[:length], self.old_v[content, :length]

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device, dtype=self.dtype)


@dataclass(frozen=True)
class Step:
    """A backend that is ready to do the step of a workload, again and again."""

    backend: AttentionBackend
    workload: Workload
    batch: AttentionBatch
    out: torch.Tensor  # of the last layer that was computed

    @classmethod
    def prepare(cls, backend: AttentionBackend, workload: Workload) -> Step:
        """Allocate and fill the cache of a new ``backend``."""
        spec = backend.spec
        tables = workload.block_tables(spec.block_size)
        backend.allocate(int(-(-workload.lengths // spec.block_size).sum()))
        _fill(backend, workload, tables)
        starts = workload.lengths - workload.queries
        batch = make_batch(tables, starts, workload.lengths, spec)
        return cls(backend, workload, batch, torch.full_like(workload.q, torch.nan))

    def plan(self) -> None:
        self.backend.plan(self.batch)

    def forward(self) -> None:
        """Every layer."""
        for layer in range(self.workload.num_layers):
            self.layer(layer)

    def layer(self, layer: int) -> None:
        work = self.workload
        self.backend.forward(layer, work.q, work.k, work.v, self.out)


def make_batch(
    tables: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, spec: AttentionSpec
) -> AttentionBatch:
    """A step that computes tokens ``starts[i] : ends[i]`` of sequence i; single ones come first."""
    counts, size = ends - starts, spec.block_size
    query_start = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    owner = torch.repeat_interleave(counts)
    position = torch.arange(len(owner)) - (query_start[:-1] - starts)[owner]
    slots = tables[owner, position // size] * size + position % size
    return AttentionBatch(
        query_start=query_start.int().to(spec.device),
        seq_lens=ends.int().to(spec.device),
        block_tables=tables.int().to(spec.device),
        slots=slots.to(spec.device),
        query_start_host=query_start.int(),
        seq_lens_host=ends.int(),
        num_decodes=int((counts == 1).sum()),
        max_query_len=int(counts.max()),
        max_seq_len=int(ends.max()),
    )


def _fill(backend: AttentionBackend, workload: Workload, tables: torch.Tensor) -> None:
    """Store what came before the step: each content once, then copies of its blocks."""
    copies: list[tuple[int, int]] = []
    size = backend.spec.block_size
    for content in range(CONTENTS):
        owners = range(content, len(tables), CONTENTS)
        if not owners:
            break
        # The longest is filled; the others are its beginnings.
        source = max(owners, key=lambda i: int(workload.old_lengths[i]))
        _fill_sequence(backend, workload, source, tables[source].tolist())
        for i in owners:
            used = -(-int(workload.old_lengths[i]) // size)
            if i != source:
                pairs = zip(tables[source].tolist(), tables[i].tolist(), strict=True)
                copies += list(pairs)[:used]
    if copies:
        backend.copy_blocks(copies)


def _fill_sequence(
    backend: AttentionBackend, workload: Workload, sequence: int, blocks: list[int]
) -> None:
    """Backends store only what they also attend over, which takes time that grows with the square
    of a context. Block by block, each as if it were a sequence of its own, it does not; and what
    lies in a slot is the same."""
    case, size = workload.case, backend.spec.block_size
    starts = list(range(0, int(workload.old_lengths[sequence]), size))
    per_step = max(1, FILL_TOKENS // size)
    for first in range(0, len(starts), per_step):
        some = starts[first : first + per_step]
        start, end = some[0], min(some[-1] + size, int(workload.old_lengths[sequence]))
        counts = torch.tensor([min(size, end - s) for s in some])
        # All blocks but the last are full, so that only the last can be a single token.
        order = counts.argsort(stable=True) if size > 1 else torch.arange(len(some))
        table = torch.tensor([[blocks[s // size]] for s in some])[order]
        index = torch.cat([torch.arange(some[i], some[i] + int(counts[i])) for i in order])
        index = index.to(workload.device)
        backend.plan(make_batch(table, torch.zeros_like(counts), counts[order], backend.spec))
        q = workload.q.new_zeros(end - start, case.num_heads, case.head_size)
        out = torch.empty_like(q)
        for layer in range(workload.num_layers):
            k, v = workload.old(layer, sequence)
            backend.forward(layer, q, k[index], v[index], out)
