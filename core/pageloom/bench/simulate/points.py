"""Which steps `pageloom bench profile` times."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

from pageloom.contract.costs import StepWork
from pageloom.memory import blocks_for
from pageloom.scheduling import Limits

DECODES_AFTER = 3
"""Further steps that each point is followed by, in which all of its sequences decode."""

CONTEXTS = (16, 128, 512, 1024, 2048, 4096, 8192, 16384)
CHUNKS = (8, 32, 128, 512, 2048, 8192)


@dataclass(frozen=True, slots=True)
class Point:
    """A step of ``decodes`` sequences that compute their newest token, and one that computes
    ``chunk`` tokens, if any. Contexts count tokens in the cache before the step."""

    decodes: int
    context: int  # of each that decodes
    chunk: int = 0
    chunk_context: int = 0

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk

    @property
    def is_basic(self) -> bool:
        """Whether a profile is of no use without it: contexts are short, sizes are all there."""
        if self.decodes and self.chunk:
            return False
        return not self.chunk_context if self.chunk else self.context <= CONTEXTS[1]

    def blocks(self, size: int) -> int:
        """Blocks of ``size`` tokens that its sequences hold at most, with what they decode after
        it."""
        chunk = blocks_for(self.chunk_context + self.chunk + DECODES_AFTER, size)
        each = blocks_for(self.context + 1 + DECODES_AFTER, size)
        return self.decodes * each + (chunk if self.chunk else 0)

    def work(self) -> StepWork:
        query_lens = [1] * self.decodes + [self.chunk] * bool(self.chunk)
        seq_lens = [self.context + 1] * self.decodes
        seq_lens += [self.chunk_context + self.chunk] * bool(self.chunk)
        return StepWork.of(query_lens, seq_lens, len(query_lens))

    def then(self) -> Point | None:
        """What the steps that follow it are, where all of their sequences have the same context:
        to a few tokens, which are not worth telling apart. None where they have not."""
        if not self.chunk:
            return self
        return None if self.decodes else Point(1, self.chunk_context + self.chunk)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def points(limits: Limits, blocks: int) -> list[Point]:
    """Decodes, chunks of prompts, and both in one step, each in contexts short and long, that hold
    no more than so many blocks and keep the limits."""
    found = [*_decodes(limits), *_chunks(limits), *_mixed(limits)]
    size = limits.block_size
    fitting = [point for point in found if point.blocks(size) <= blocks and _fits(point, limits)]
    return list(dict.fromkeys(fitting))


def _decodes(limits: Limits) -> Iterator[Point]:
    """Every second power of two in each context, and all powers in the shortest."""
    batches = _powers(min(limits.max_num_seqs, limits.max_num_batched_tokens))
    for batch in batches:
        yield Point(batch, CONTEXTS[0])
    for context, batch in product(CONTEXTS[1:], batches[::2]):
        yield Point(batch, context)


def _chunks(limits: Limits) -> Iterator[Point]:
    budget = limits.max_num_batched_tokens
    for chunk in sorted({*(size for size in CHUNKS if size < budget), budget // 2, budget}):
        for context in (0, CONTEXTS[0], *CONTEXTS[2:]):
            yield Point(0, 0, chunk, context)


def _mixed(limits: Limits) -> Iterator[Point]:
    batches = _powers(min(limits.max_num_seqs - 1, limits.max_num_batched_tokens // 2))
    for batch, context in product(batches[1::2], (CONTEXTS[0], CONTEXTS[1], CONTEXTS[3])):
        left = limits.max_num_batched_tokens - batch
        for chunk in sorted({min(16, left), min(64, left), left // 2, left}):
            yield Point(batch, context, chunk, 0)


def _powers(most: int) -> list[int]:
    """1, 2, 4 and so on, and ``most``."""
    return sorted({*(1 << n for n in range(max(most, 1).bit_length()) if 1 << n <= most), most})


def _fits(point: Point, limits: Limits) -> bool:
    room = limits.max_model_len - DECODES_AFTER - 1
    longest = max(point.context + 1, point.chunk_context + point.chunk)
    seats = point.decodes + bool(point.chunk)
    return (
        point.tokens > 0
        and point.chunk != 1
        and longest <= room
        and seats <= limits.max_num_seqs
        and point.tokens <= limits.max_num_batched_tokens
        and (limits.enable_chunked_prefill or not point.chunk_context)
    )
