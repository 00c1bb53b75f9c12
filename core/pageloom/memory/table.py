"""Block tables: from a position in a sequence to a physical block."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from pageloom.memory.pool import BlockPool


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


def blocks_for_branches(
    num_branches: int, prompt_tokens: int, num_tokens: int, block_size: int
) -> int:
    """How many blocks hold ``num_branches`` sequences of ``num_tokens`` tokens that share a prompt.

    That is at most, and not always possible with less: a branch that is computed again when it has
    one output token computes the last block of the prompt itself.
    """
    shared = (prompt_tokens - 1) // block_size
    return shared + num_branches * (blocks_for(num_tokens, block_size) - shared)


def tokens_for_branches(
    num_branches: int, prompt_tokens: int, num_blocks: int, block_size: int
) -> int:
    """The most ``num_tokens`` for which `blocks_for_branches` is no more than ``num_blocks``."""
    shared = (prompt_tokens - 1) // block_size
    return (shared + (num_blocks - shared) // num_branches) * block_size


class BlockTable:
    """The blocks of one branch, in order: position p is in ``blocks[p // block_size]``.

    ``blocks`` is an ``int32`` buffer, so that numpy can read it without copying; only this class
    changes it. Tables may share blocks; a shared block is copied before it is written.
    """

    __slots__ = ("block_size", "blocks", "pool")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self.pool = pool
        self.block_size = block_size
        self.blocks = array("i")

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held."""
        return len(self.blocks) * self.block_size

    def missing(self, num_tokens: int) -> int:
        """Blocks to allocate before the table holds ``num_tokens`` tokens."""
        return max(0, blocks_for(num_tokens, self.block_size) - len(self.blocks))

    def grow(self, num_tokens: int) -> None:
        """Allocate what is `missing` for ``num_tokens`` tokens. Raises `ValueError` if the pool
        has too few free blocks; then nothing is changed."""
        missing = self.missing(num_tokens)
        if missing:
            self.blocks.extend(self.pool.allocate(missing))

    def extend(self, blocks: Iterable[int]) -> None:
        """Go on with ``blocks`` that are in the pool already and hold the right tokens."""
        blocks = array("i", blocks)
        self.pool.share(blocks)
        self.blocks.extend(blocks)

    def fork(self) -> BlockTable:
        """A table of the same blocks, which both share from now on."""
        fork = BlockTable(self.pool, self.block_size)
        fork.extend(self.blocks)
        return fork

    def shares(self, position: int) -> bool:
        """Whether the block that ``position`` lies in is shared, so that a write copies it.

        False if there is no such block yet.
        """
        index = position // self.block_size
        return index < len(self.blocks) and self.pool.references(self.blocks[index]) > 1

    def copy_on_write(self, position: int) -> tuple[int, int]:
        """Replace the shared block of ``position`` by a new one; returns which block must be
        copied to which. Raises `ValueError` if the pool has no free block."""
        index = position // self.block_size
        source = self.blocks[index]
        (target,) = self.pool.allocate(1)
        self.pool.release([source])
        self.blocks[index] = target
        return source, target

    def release(self) -> None:
        """Give every block back. The table is then empty and may grow again."""
        # From the end, so that the pool's stack hands the first blocks out first.
        self.pool.release(reversed(self.blocks))
        del self.blocks[:]


def distinct_blocks(tables: Sequence[BlockTable]) -> int:
    """How many blocks ``tables`` hold together."""
    if len(tables) == 1:
        return len(tables[0].blocks)
    return len({block for table in tables for block in table.blocks})


def move(tables: Sequence[BlockTable], pool: BlockPool) -> list[tuple[int, int]]:
    """Move ``tables`` to blocks of another pool, where they share among themselves as before.

    Returns where the content must be copied: (block of the old pool, block of ``pool``). Raises
    `ValueError` if ``pool`` has fewer free blocks than `distinct_blocks`; then nothing is changed.
    """
    sources = list(dict.fromkeys(block for table in tables for block in table.blocks))
    targets = pool.allocate(len(sources))
    moved = dict(zip(sources, targets, strict=True))
    for table in tables:
        blocks = array("i", [moved[block] for block in table.blocks])
        pool.share(blocks)
        table.release()
        table.pool = pool
        table.blocks.extend(blocks)
    pool.release(targets)  # the tables hold them now
    return list(moved.items())
