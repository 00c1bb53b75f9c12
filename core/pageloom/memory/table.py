"""Block tables: from a position in a sequence to a physical block."""

from __future__ import annotations

from array import array

from pageloom.memory.pool import BlockPool


def blocks_for(num_tokens: int, block_size: int) -> int:
    """How many blocks hold ``num_tokens`` tokens."""
    return -(-num_tokens // block_size)


class BlockTable:
    """The blocks of one branch, in order: position p is in ``blocks[p // block_size]``.

    ``blocks`` is an ``int32`` buffer, so that numpy can read it without copying; only this class
    changes it.
    """

    __slots__ = ("_pool", "block_size", "blocks")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
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
            self.blocks.extend(self._pool.allocate(missing))

    def release(self) -> None:
        """Give every block back. The table is then empty and may grow again."""
        # From the end, so that the pool's stack hands the first blocks out first.
        self._pool.release(reversed(self.blocks))
        del self.blocks[:]
