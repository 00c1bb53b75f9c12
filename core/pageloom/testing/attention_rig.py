"""The engine's part, for one attention backend: blocks, batches, and a check of every answer."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch

from pageloom.contract import AttentionBatch
from pageloom.contract.quantizer import Kind
from pageloom.testing.attention_candidate import Candidate
from pageloom.testing.attention_cases import Case
from pageloom.testing.attention_oracle import TOLERANCE, attention, excess
from pageloom.testing.attention_shadow import Branch, Shadow

CHECKED_ROWS = 256  # of one sequence in one step: the oracle is slow
BRANCHES = 10  # that a rig has room for if none takes more than three blocks


class Rig:
    """Drives one backend through steps as the engine does, and checks every answer.

    What each slot must hold is kept in plain tensors. All blocks start full of NaN, and those that
    are freed are filled with NaN again.
    """

    def __init__(
        self,
        candidate: Candidate,
        case: Case,
        *,
        seed: int = 0,
        tokens: int = 640,
        branches: int = 0,
        pool: Sequence[int] = (),
    ) -> None:
        """The cache has blocks for at least ``tokens`` and one more for each of ``branches``; or it
        has those of ``pool`` and all below them, of which no others are then used.

        Raises `RefusedError` if the backend refuses the case.
        """
        self.case, self.spec = case, candidate.spec(case)
        self.quantizer = candidate.quantizer(case)
        size = self.spec.block_size
        few = BRANCHES * min(3, -(-case.max_model_len // size))
        self.pool = list(pool or range(max(few, -(-tokens // size) + branches)))
        self.backend = candidate.backend(
            candidate.backend.Config(**candidate.options), self.spec, self.quantizer
        )
        self.bytes_per_block = self.backend.bytes_per_block()
        self.backend.allocate(max(self.pool) + 1)
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.sinks = [
            self._normal(1, s.num_heads)[0].float().to(self.spec.device) if s.sinks else None
            for s in case.layers
        ]
        self.holders = dict.fromkeys(self.pool, 0)
        self._shadow = Shadow(case.layers, self.pool, size, self.spec.dtype)
        self.slack = 1.0  # multiplies the tolerance
        self._steps = 0
        self._poisoned = self._nan_block()
        self._poison(self.pool)

    # What the engine asks for.

    def step(self, *work: tuple[Branch, int]) -> None:
        """Run some new tokens of each branch; raise `AssertionError` if an answer is wrong."""
        ordered = sorted(work, key=lambda item: item[1] > 1)
        for branch, n in ordered:
            self.reserve(branch, branch.length + n)
        with torch.inference_mode():
            batch = self._batch([(branch.blocks, branch.length, n) for branch, n in ordered])
            before = {f.name: _copied(getattr(batch, f.name)) for f in fields(batch)}
            self.backend.plan(batch)
            for branch, n in ordered:
                branch.length += n
            for index in range(len(self.case.layers)):
                self._check_layer(index, batch, ordered)
        for name, value in before.items():
            after = getattr(batch, name)
            alike = torch.equal(after, value) if isinstance(value, torch.Tensor) else after == value
            assert alike, f"the batch must not be changed, but {name} was"
        self._steps += 1

    def reserve(self, branch: Branch, length: int) -> None:
        """Give the branch blocks for its first ``length`` tokens."""
        while len(branch.blocks) * self.spec.block_size < length:
            branch.blocks.append(self.take())

    def fill(self, length: int, distinct: int) -> Branch:
        """A branch of ``length`` tokens that took little time to compute.

        Blocks are written as sequences of their own, so that no token looks back farther than its
        block, and only the first ``distinct`` blocks so: the others are copies.
        """
        branch, size = Branch(), self.spec.block_size
        self.reserve(branch, length)
        drawn = branch.blocks[:distinct]
        self.step(*((Branch([block]), min(size, length)) for block in drawn))
        others = branch.blocks[len(drawn) :]
        for start in range(0, len(others), len(drawn)):
            self.copy(list(zip(drawn, others[start:], strict=False)))
        branch.length = length
        return branch

    def fork(self, parent: Branch, tokens: int | None = None) -> Branch:
        """A branch with the parent's first tokens: full blocks are shared, a part is copied.

        Where full blocks suffice, the tokens may be ones that the parent writes in the next step.
        """
        tokens = parent.length if tokens is None else tokens
        full = tokens // self.spec.block_size
        child = Branch(parent.blocks[:full], tokens)
        for block in child.blocks:
            self.holders[block] += 1
        if tokens % self.spec.block_size:
            child.blocks.append(self.take())
            self.copy([(parent.blocks[full], child.blocks[full])])
        return child

    def copy(self, pairs: Sequence[tuple[int, int]]) -> None:
        with torch.inference_mode():
            self.backend.copy_blocks(pairs)
        self._shadow.copy(pairs)

    def swap(self, branch: Branch) -> None:
        """Take a branch's blocks out of the cache and put them back elsewhere."""
        old = branch.blocks
        data = self.read(old)
        kept = data.clone()
        branch.blocks = [self.take() for _ in old]
        self._shadow.copy(list(zip(old, branch.blocks, strict=True)))
        self.release(old)
        alike = torch.equal(data, kept)
        assert alike, "what read_blocks returned must not alias the cache"
        self.write(branch.blocks, data)
        alike = torch.equal(data, kept)
        assert alike, "write_blocks must not change what it is given"

    def read(self, blocks: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            data = self.backend.read_blocks(blocks)
        assert data.shape == (len(blocks), self.bytes_per_block)
        assert (data.dtype, data.device.type) == (torch.uint8, "cpu")
        assert data.is_contiguous()
        return data

    def write(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        with torch.inference_mode():
            self.backend.write_blocks(blocks, data)

    def free(self, branch: Branch) -> None:
        self.release(branch.blocks)
        branch.blocks, branch.length = [], 0

    def take(self) -> int:
        block = self.random.choice([b for b, n in self.holders.items() if n == 0])
        self.holders[block] = 1
        return block

    def release(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self.holders[block] -= 1
        self._poison([block for block in blocks if not self.holders[block]])

    # How it is done.

    def draw(self, index: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Random q, k and v of a layer, as models make them: slices of one matrix, and every other
        time with a k that was rotated out of place and so lies alone."""
        layer = self.case.layers[index]
        heads = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)
        merged = self._normal(tokens, sum(heads) * layer.head_size).to(self.spec.device)
        q, k, v = (
            part.view(tokens, h, layer.head_size)
            for part, h in zip(
                merged.split([h * layer.head_size for h in heads], dim=1), heads, strict=True
            )
        )
        k.copy_(self.representable(k, index, "k"))
        v.copy_(self.representable(v, index, "v"))
        return q, k.clone() if self._steps % 2 else k, v

    def representable(self, x: torch.Tensor, index: int, kind: Kind) -> torch.Tensor:
        """``x`` moved to values that the KV format holds as they are.

        A kernel that codes may round a tie the other way than the reference; there are none now.
        """
        return self._stored(x, index, kind)

    def compare(
        self, actual: torch.Tensor, expected: torch.Tensor, positions: torch.Tensor, where: str
    ) -> None:
        """Raise `AssertionError` unless ``actual [n, num_heads, head_size]`` will do."""
        __tracebackhide__ = True
        dtype = self.spec.dtype
        error = excess(actual, expected, TOLERANCE[dtype] * self.slack)
        if bool((error <= 1).all()):
            return
        row, head, element = (int(i) for i in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{where}, token {int(positions[row])}, head {head}, element {element}: got "
            f"{actual[row, head, element]:.6g}, not {expected[row, head, element]:.6g}, "
            f"{error[row, head, element]:.3g} times what {dtype} is allowed; "
            f"{int((error > 1).sum())} of {error.numel()} elements differ"
        )

    def _check_layer(
        self, index: int, batch: AttentionBatch, work: Sequence[tuple[Branch, int]]
    ) -> None:
        __tracebackhide__ = True
        q, k, v, out = self.call(index, batch.num_tokens)
        self._shadow.store(
            index,
            batch.slots.cpu(),
            self._stored(k, index, "k").cpu(),
            self._stored(v, index, "v").cpu(),
        )
        starts, sinks = batch.query_start_host.tolist(), self.sinks[index]
        for i, (branch, n) in enumerate(work):
            rows = torch.arange(n) if n <= CHECKED_ROWS else self._some_rows(n)
            positions = branch.length - n + rows
            keys, values = self._shadow.sequence(index, branch)
            expected = attention(
                q.cpu()[starts[i] + rows],
                positions,
                keys,
                values,
                self.case.layers[index],
                None if sinks is None else sinks.cpu(),
            )
            where = f"layer {index}, sequence {i} of {len(work)} ({n} of {branch.length} tokens)"
            self.compare(out[starts[i] + rows], expected, positions, where)

    def call(
        self, index: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """One layer's `forward` with random q, k and v; returns them, as they are to be attended
        with, and the output."""
        q, k, v = self.draw(index, tokens)
        return q, k, v, self.attend(index, q, k, v)

    def attend(
        self,
        index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """One layer's `forward` into a strided ``out`` full of NaN; returns that on the CPU."""
        tokens, heads, head_size = q.shape
        around = torch.full(
            (tokens + 2, heads + 1, head_size), torch.nan, dtype=q.dtype, device=q.device
        )
        out, sinks = around[1:-1, :-1], self.sinks[index]
        optional: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
        given = {"v": v, **optional}
        if rotary is None:
            given |= {"q": q, "k": k}
        else:
            optional["rotary"] = rotary
            given |= {"cos": rotary[0], "sin": rotary[1]}
        before = {name: x.clone() for name, x in given.items()}
        self.backend.forward(index, q, k, v, out, **optional)
        for name, kept in before.items():
            alike = torch.equal(given[name].nan_to_num(), kept.nan_to_num())
            assert alike, f"forward must not change {name}"
        result = out.cpu().clone()
        out.fill_(torch.nan)
        untouched = bool(around.isnan().all())
        assert untouched, "forward must write to out only"
        return result

    def _stored(self, x: torch.Tensor, index: int, kind: Kind) -> torch.Tensor:
        """What the cache is to give back for ``x``."""
        if self.quantizer is None:
            return x
        data = self.quantizer.encode(x.contiguous(), index, kind)
        return self.quantizer.decode(data, index, kind, self.spec.dtype)

    def _some_rows(self, n: int) -> torch.Tensor:
        """Rows of a long chunk to check: the first, the last, and some between."""
        between = self.random.sample(range(1, n - 1), CHECKED_ROWS - 2)
        return torch.tensor([0, *sorted(between), n - 1])

    def _batch(self, work: Sequence[tuple[Sequence[int], int, int]]) -> AttentionBatch:
        """A batch of (block table, tokens before this step, tokens of this step)."""
        size, device = self.spec.block_size, self.spec.device
        starts = torch.tensor([0, *(n for _, _, n in work)]).cumsum(0).int()
        lengths = torch.tensor([old + n for _, old, n in work], dtype=torch.int32)
        # A table has what the sequence needs; one that the next step needs may be there already.
        tables = [list(blocks[: -(-(old + n) // size)]) for blocks, old, n in work]
        width = max(map(len, tables))
        padded = torch.tensor([t + [0] * (width - len(t)) for t in tables], dtype=torch.int32)
        slots = [
            blocks[at // size] * size + at % size
            for blocks, old, n in work
            for at in range(old, old + n)
        ]
        return AttentionBatch(
            query_start=starts.to(device),
            seq_lens=lengths.to(device),
            block_tables=padded.to(device),
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            query_start_host=starts.clone(),
            seq_lens_host=lengths.clone(),
            num_decodes=sum(n == 1 for _, _, n in work),
            max_query_len=max(n for _, _, n in work),
            max_seq_len=int(lengths.max()),
        )

    def _nan_block(self) -> torch.Tensor:
        """The bytes of a block in which a model gone wrong has stored NaN."""
        size = self.spec.block_size
        with torch.inference_mode():
            self.backend.plan(self._batch([([self.pool[0]], 0, size)]))
            for index in range(len(self.case.layers)):
                q, k, v = (x.fill_(torch.nan) for x in self.draw(index, size))
                self.attend(index, q, k, v)
        return self.read([self.pool[0]]).clone()

    def _poison(self, blocks: Sequence[int]) -> None:
        if blocks:
            self.write(blocks, self._poisoned.expand(len(blocks), -1).contiguous())
            self._shadow.forget(blocks)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.spec.dtype)


class UnroundedRig(Rig):
    """Draws values that the KV format cannot hold, so that storing them loses precision.

    A kernel may round a tie the other way than the reference does; so one element in ten may be
    wrong. If unstored values are attended to, almost all are.
    """

    def representable(self, x: torch.Tensor, index: int, kind: Kind) -> torch.Tensor:
        return x

    def compare(
        self, actual: torch.Tensor, expected: torch.Tensor, positions: torch.Tensor, where: str
    ) -> None:
        wrong = float((excess(actual, expected, TOLERANCE[self.spec.dtype]) > 1).double().mean())
        assert wrong <= 0.1, f"{where}: {wrong:.0%} of the elements are not of what is stored"


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
