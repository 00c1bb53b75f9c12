"""What attention backends are held to: attention by its definition, and a rig that drives one.

The rig plays the engine's part. It hands out blocks, builds batches, and keeps every branch's K
and V in plain tensors, so that what a backend answers can be computed again in float64 from
nothing but the contract.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import torch

from pageloom.contract import AttentionBackend, AttentionBatch, AttentionSpec, LayerSpec
from pageloom.contract.quantizer import KVQuantizer

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    layer: LayerSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Float64 attention of the last tokens ``q [n, H, D]`` over ``k`` and ``v [L, Hkv, D]``."""
    group = layer.num_heads // layer.num_kv_heads
    k, v = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), k) * layer.scale
    if layer.softcap is not None:
        scores = layer.softcap * torch.tanh(scores / layer.softcap)
    token, query = torch.arange(len(k)), torch.arange(len(k) - len(q), len(k))
    age = query.unsqueeze(1) - token
    seen = (age >= 0) & (age < (layer.window or len(k)))
    weights = torch.exp(scores) * seen
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double()).view(-1, 1, 1)
    return torch.einsum("hnl,lhd->nhd", weights / total, v)


@dataclass(frozen=True)
class Case:
    """One thing to ask of a backend."""

    layers: tuple[LayerSpec, ...]
    block_size: int | None = 16
    dtype: torch.dtype = torch.float32
    quantizer: type[KVQuantizer] | None = None
    max_model_len: int = 96

    def spec(self, backend: type[AttentionBackend]) -> AttentionSpec:
        """Raises `ValueError` if the backend cannot have this block size."""
        return AttentionSpec(
            device=torch.device("cpu"),
            dtype=self.dtype,
            layers=self.layers,
            block_size=backend.block_size(self.block_size, self.max_model_len),
            max_model_len=self.max_model_len,
            quantizer=self.quantizer.__name__ if self.quantizer else None,
        )

    def refusal(self, backend: type[AttentionBackend]) -> str | None:
        """Why the backend will not do this, None if it will."""
        try:
            return backend.check(self.spec(backend))
        except ValueError as error:
            return str(error)


@dataclass(eq=False)
class Branch:
    """A sequence, with all that its attention depends on: per layer K and V ``[L, Hkv, D]``."""

    keys: list[torch.Tensor]
    values: list[torch.Tensor]
    blocks: list[int] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.keys[0])


class Rig:
    """Drives one backend through steps and checks every answer.

    All blocks start full of NaN, and freed ones are filled with NaN again.
    """

    def __init__(
        self, backend: type[AttentionBackend], case: Case, tokens: int = 768, seed: int = 0
    ) -> None:
        self.case, self.spec = case, case.spec(backend)
        reason = backend.check(self.spec)
        if reason is not None:
            raise ValueError(f"{backend.__name__} {reason}")
        self.quantizer = case.quantizer(case.quantizer.Config()) if case.quantizer else None
        self.backend = backend(backend.Config(), self.spec, self.quantizer)
        num_blocks = max(12, tokens // self.spec.block_size)
        self.bytes_per_block = self.backend.bytes_per_block()
        self.backend.allocate(num_blocks)
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sinks = [
            self._normal(layer.num_heads).float() if layer.sinks else None for layer in case.layers
        ]
        self.holders = [0] * num_blocks
        self._poison(range(num_blocks))

    # What the engine asks for.

    def branch(self) -> Branch:
        empty = [
            torch.empty(0, layer.num_kv_heads, layer.head_size, dtype=self.spec.dtype)
            for layer in self.case.layers
        ]
        return Branch(list(empty), list(empty))

    def step(self, *work: tuple[Branch, int]) -> list[list[torch.Tensor]]:
        """Run some new tokens of each branch and check them against the oracle.

        Returns for each item of ``work`` its output in each layer, ``[n, num_heads, head_size]``.
        """
        ordered = sorted(work, key=lambda item: item[1] > 1)
        for branch, n in ordered:
            self._grow(branch, len(branch) + n)
        tables = [(branch.blocks, len(branch), n) for branch, n in ordered]
        self.backend.plan(self._batch(tables))
        layers = [self._forward(layer, ordered) for layer in range(len(self.case.layers))]
        answers = {
            id(branch): list(parts) for (branch, _), *parts in zip(ordered, *layers, strict=True)
        }
        return [answers[id(branch)] for branch, _ in work]

    def fork(self, parent: Branch, tokens: int | None = None) -> Branch:
        """A branch with the parent's first tokens: full blocks are shared, a part is copied."""
        tokens = len(parent) if tokens is None else tokens
        full = tokens // self.spec.block_size
        child = replace(
            parent,
            keys=[k[:tokens] for k in parent.keys],
            values=[v[:tokens] for v in parent.values],
            blocks=parent.blocks[:full],
        )
        for block in child.blocks:
            self.holders[block] += 1
        if tokens % self.spec.block_size:
            child.blocks.append(self.take())
            self.backend.copy_blocks([(parent.blocks[full], child.blocks[full])])
        return child

    def swap(self, branch: Branch) -> None:
        """Take a branch's blocks out of the cache and put them back elsewhere."""
        data = self.backend.read_blocks(branch.blocks)
        assert data.shape == (len(branch.blocks), self.bytes_per_block)
        assert (data.dtype, data.device.type) == (torch.uint8, "cpu")
        assert data.is_contiguous()
        kept = data.clone()
        old, branch.blocks = branch.blocks, [self.take() for _ in branch.blocks]
        self.release(old)
        assert torch.equal(data, kept), "what read_blocks returned must not alias the cache"
        self.backend.write_blocks(branch.blocks, data)

    def free(self, branch: Branch) -> None:
        self.release(branch.blocks)
        branch.blocks = []

    # How it is done.

    def _forward(self, index: int, work: list[tuple[Branch, int]]) -> list[torch.Tensor]:
        layer, total = self.case.layers[index], sum(n for _, n in work)
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        merged = self._normal(total, sum(heads) * layer.head_size)
        before = merged.clone()
        q, k, v = (
            part.view(total, h, layer.head_size)
            for part, h in zip(
                merged.split([h * layer.head_size for h in heads], dim=1), heads, strict=True
            )
        )
        around = torch.full((total, layer.num_heads + 1, layer.head_size), torch.nan)
        around = around.to(self.spec.dtype)
        out = around[:, :-1]
        sinks = self.sinks[index]
        arguments = (q, k, v, out) if sinks is None else (q, k, v, out, sinks)
        self.backend.forward(index, *arguments)
        assert torch.equal(merged, before), "forward must not change q, k or v"
        assert around[:, -1].isnan().all(), "forward must write to out only"
        answers, start = [], 0
        for branch, n in work:
            mine = slice(start, start + n)
            start += n
            branch.keys[index] = torch.cat([branch.keys[index], self._stored(k[mine], index, "k")])
            branch.values[index] = torch.cat(
                [branch.values[index], self._stored(v[mine], index, "v")]
            )
            expected = attention(q[mine], branch.keys[index], branch.values[index], layer, sinks)
            tolerance = TOLERANCE[self.spec.dtype]
            torch.testing.assert_close(out[mine].double(), expected, atol=tolerance, rtol=tolerance)
            answers.append(out[mine].clone())
        return answers

    def _stored(self, x: torch.Tensor, layer: int, kind: str) -> torch.Tensor:
        if self.quantizer is None:
            return x
        data = self.quantizer.encode(x.contiguous(), layer, kind)
        return self.quantizer.decode(data, layer, kind, self.spec.dtype)

    def _batch(self, work: list[tuple[list[int], int, int]]) -> AttentionBatch:
        """A batch of (block table, tokens before this step, tokens of this step)."""
        size = self.spec.block_size
        starts = torch.tensor([0, *(n for _, _, n in work)], dtype=torch.int32).cumsum(0)
        lengths = torch.tensor([old + n for _, old, n in work], dtype=torch.int32)
        width = max(len(blocks) for blocks, _, _ in work)
        tables = [[*blocks, *[0] * (width - len(blocks))] for blocks, _, _ in work]
        slots = [
            blocks[at // size] * size + at % size
            for blocks, old, n in work
            for at in range(old, old + n)
        ]
        return AttentionBatch(
            query_start=starts.int(),
            seq_lens=lengths,
            block_tables=torch.tensor(tables, dtype=torch.int32),
            slots=torch.tensor(slots, dtype=torch.int64),
            query_start_host=starts.int(),
            seq_lens_host=lengths.clone(),
            num_decodes=sum(n == 1 for _, _, n in work),
            max_query_len=max(n for _, _, n in work),
            max_seq_len=int(lengths.max()),
        )

    def _grow(self, branch: Branch, length: int) -> None:
        while len(branch.blocks) * self.spec.block_size < length:
            branch.blocks.append(self.take())

    def take(self) -> int:
        block = self.random.choice([b for b, n in enumerate(self.holders) if n == 0])
        self.holders[block] = 1
        return block

    def release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
        self._poison([block for block in blocks if not self.holders[block]])

    def _poison(self, blocks: range | list[int]) -> None:
        """Store NaN in every slot, as a model gone wrong would."""
        if not blocks:
            return
        size = self.spec.block_size
        self.backend.plan(self._batch([([block], 0, size) for block in blocks]))
        for index, layer in enumerate(self.case.layers):
            shape = (len(blocks) * size, layer.num_heads, layer.head_size)
            q = torch.full(shape, torch.nan, dtype=self.spec.dtype)
            k = q[:, : layer.num_kv_heads]
            sinks = self.sinks[index]
            arguments = (q, k, k, q.clone()) if sinks is None else (q, k, k, q.clone(), sinks)
            self.backend.forward(index, *arguments)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.spec.dtype)
