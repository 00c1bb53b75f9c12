"""The pool of physical KV blocks and their reference counts."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pageloom.memory.table import BlockTable


class IntegrityError(RuntimeError):
    """A block was leaked, freed twice or counted wrongly: a fault of the core, never of a user."""


class BlockPool:
    """``num_blocks`` blocks numbered from 0, each free or held by one or more block tables.

    The free list is a stack: the block freed last is used first, while it is still in a cache.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._references = array("i", [0]) * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> array[int]:
        """Take ``count`` free blocks, one reference each. Raises `ValueError` if there are fewer;
        callers ask `num_free` first."""
        if count > len(self._free):
            raise ValueError(f"asked for {count} blocks, {len(self._free)} are free")
        split = len(self._free) - count
        blocks = self._free[split:]
        del self._free[split:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which must be held already."""
        for block in blocks:
            if self._references[block] < 1:
                raise IntegrityError(f"block {block} is shared but nobody holds it")
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each of ``blocks``; those without any left are free again."""
        for block in blocks:
            if self._references[block] < 1:
                raise IntegrityError(f"block {block} is released but nobody holds it")
            self._references[block] -= 1
            if not self._references[block]:
                self._free.append(block)


def check_integrity(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """Raise `IntegrityError` unless ``tables`` are exactly what holds the pool's blocks.

    Costs a pass over all blocks; for tests, and for an idle engine in debug mode.
    """
    held = Counter(block for table in tables for block in table.blocks)
    free = Counter(pool._free)
    for block in range(pool.num_blocks):
        references, listed = pool.references(block), free[block]
        if references != held[block]:
            raise IntegrityError(
                f"block {block} counts {references} references, {held[block]} tables hold it"
            )
        if listed != (references == 0):
            raise IntegrityError(
                f"block {block} has {references} references and is {listed} times in the free list"
            )
    strangers = [block for block in held | free if not 0 <= block < pool.num_blocks]
    if strangers:
        raise IntegrityError(f"blocks {strangers} are not of a pool of {pool.num_blocks}")
