"""The block pool and block tables, driven at random."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pageloom.memory import BlockPool, BlockTable, IntegrityError, blocks_for, check_integrity

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class Tables(RuleBasedStateMachine):
    """Tables that grow and go, and holders that share their blocks, on one small pool."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.live: list[BlockTable] = []

    @rule(target=tables)
    def open(self):
        table = BlockTable(self.pool, BLOCK_SIZE)
        self.live.append(table)
        return table

    @rule(table=tables, tokens=st.integers(0, 60))
    def grow(self, table, tokens):
        held, free = list(table.blocks), self.pool.num_free
        missing = table.missing(tokens)
        assert missing == max(0, blocks_for(tokens, BLOCK_SIZE) - len(held))
        if missing > free:
            with pytest.raises(ValueError, match=f"{missing} blocks"):
                table.grow(tokens)
            assert list(table.blocks) == held
        else:
            table.grow(tokens)
            assert list(table.blocks[: len(held)]) == held
            assert table.capacity >= tokens
            assert self.pool.num_free == free - missing

    @rule(target=tables, table=tables)
    def share(self, table):
        twin = BlockTable(self.pool, BLOCK_SIZE)
        self.pool.share(table.blocks)
        twin.blocks.extend(table.blocks)
        self.live.append(twin)
        return twin

    @rule(table=consumes(tables))
    def close(self, table):
        table.release()
        assert not table.blocks
        self.live.remove(table)

    @invariant()
    def every_block_is_accounted_for(self):
        check_integrity(self.pool, self.live)
        held = {block for table in self.live for block in table.blocks}
        assert self.pool.num_used == len(held)


Tables.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestTables = Tables.TestCase


def test_a_block_freed_twice_is_found():
    pool = BlockPool(2)
    blocks = pool.allocate(1)
    pool.release(blocks)
    with pytest.raises(IntegrityError, match="released but nobody holds it"):
        pool.release(blocks)


def test_a_free_block_cannot_be_shared():
    with pytest.raises(IntegrityError, match="shared but nobody holds it"):
        BlockPool(2).share([1])


def test_a_leaked_block_is_found():
    pool = BlockPool(2)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match="1 references, 0 tables hold it"):
        check_integrity(pool, [])


def test_a_block_in_two_tables_that_was_never_shared_is_found():
    pool = BlockPool(2)
    first, second = BlockTable(pool, 1), BlockTable(pool, 1)
    first.grow(1)
    second.blocks.extend(first.blocks)
    with pytest.raises(IntegrityError, match="1 references, 2 tables hold it"):
        check_integrity(pool, [first, second])


def test_a_pool_has_blocks():
    with pytest.raises(ValueError, match="at least 1 block"):
        BlockPool(0)
