"""The pool of physical KV blocks and their reference counts."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from pageloom.memory.prefix import BlockKey, PrefixIndex

if TYPE_CHECKING:
    from pageloom.memory.table import BlockTable


class IntegrityError(RuntimeError):
    """A block was leaked, freed twice or counted wrongly: a fault of the core, never of a user."""


class BlockPool:
    """``num_blocks`` blocks numbered from 0, each free or held by one or more block tables.

    A block whose content was registered keeps it when nobody holds it any more: it is free, but
    taken only when no other is, the one that was released longest ago first (LRU). Of the others
    the block freed last is used first, while it is still in a cache.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a block pool needs at least 1 block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._free = array("i", range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()  # free, but with content to reuse
        self._references = array("i", [0]) * num_blocks
        self._index = PrefixIndex()

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those with content to reuse included."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and whose content can be reused."""
        return len(self._cached)

    def references(self, block: int) -> int:
        return self._references[block]

    def allocate(self, count: int) -> array[int]:
        """Take ``count`` free blocks, one reference each. Raises `ValueError` if there are fewer;
        callers ask `num_free` first."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} blocks, {self.num_free} are free")
        for _ in range(count - len(self._free)):
            block, _ = self._cached.popitem(last=False)
            self._index.remove(block)
            self._free.append(block)
        split = len(self._free) - count
        blocks = self._free[split:]
        del self._free[split:]
        for block in blocks:
            self._references[block] = 1
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of ``blocks``, which are held already or were just found."""
        for block in blocks:
            if not self._references[block]:
                if block not in self._cached:
                    raise IntegrityError(f"block {block} is shared but nobody holds it")
                del self._cached[block]
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference to each of ``blocks``; those without any left are free again.

        Of a sequence, release the last block first: it is of use to fewer others than the first.
        """
        for block in blocks:
            if self._references[block] < 1:
                raise IntegrityError(f"block {block} is released but nobody holds it")
            self._references[block] -= 1
            if not self._references[block]:
                if block in self._index:
                    self._cached[block] = None
                else:
                    self._free.append(block)

    # -- content ----------------------------------------------------------------------------

    def register(self, key: BlockKey, block: int) -> None:
        """Note that ``block``, which is held and full, holds ``key``."""
        self._index.add(key, block)

    def find(self, key: BlockKey) -> int | None:
        """A block that holds ``key``. `share` it before anything else is done to the pool."""
        return self._index.find(key)

    def forget(self, blocks: Iterable[int]) -> None:
        """Give up the content of ``blocks``: it was never computed, or is not to be reused."""
        for block in blocks:
            self._index.remove(block)
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def forget_all(self) -> None:
        """Give up all content: nothing that is in the pool now will be found."""
        self._index = PrefixIndex()
        self._free.extend(self._cached)
        self._cached.clear()


def check_integrity(pool: BlockPool, tables: Iterable[BlockTable]) -> None:
    """Raise `IntegrityError` unless ``tables`` are exactly what holds the pool's blocks.

    Costs a pass over all blocks; for tests, and for an idle engine in debug mode.
    """
    held = Counter(block for table in tables for block in table.blocks)
    free = Counter([*pool._free, *pool._cached])
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
    if nameless := [block for block in pool._cached if block not in pool._index]:
        raise IntegrityError(f"blocks {nameless} are kept for a content that cannot be found")
