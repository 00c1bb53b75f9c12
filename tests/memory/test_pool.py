"""The block pool and block tables, driven at random."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from pageloom.memory import (
    BlockPool,
    BlockTable,
    IntegrityError,
    block_key,
    blocks_for,
    blocks_for_branches,
    check_integrity,
    distinct_blocks,
    move,
    tokens_for_branches,
)

NUM_BLOCKS, BLOCK_SIZE = 12, 4


class Tables(RuleBasedStateMachine):
    """Tables that grow, fork, write, move to another pool and go; blocks whose content is known
    are found as long as nobody took them."""

    tables = Bundle("tables")

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.host = BlockPool(NUM_BLOCKS // 2)
        self.live: list[BlockTable] = []
        self.contents = count()
        self.known: dict[int, int] = {}  # block: content

    @rule(target=tables)
    def open(self):
        table = BlockTable(self.pool, BLOCK_SIZE)
        self.live.append(table)
        return table

    @rule(table=tables, tokens=st.integers(0, 60))
    def grow(self, table, tokens):
        held, free = list(table.blocks), table.pool.num_free
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
            assert table.pool.num_free == free - missing
            if table.pool is self.pool:
                self.overwrite(table.blocks[len(held) :])

    @rule(target=tables, table=tables)
    def fork(self, table):
        fork = table.fork()
        self.live.append(fork)
        return fork

    @rule(table=tables, position=st.integers(0, 60))
    def write(self, table, position):
        if position >= table.capacity:
            assert not table.shares(position)
            return
        block = table.blocks[position // BLOCK_SIZE]
        sharers = [other for other in self.live if other.pool is table.pool]
        shared = sum(block in other.blocks for other in sharers) > 1
        assert table.shares(position) == shared
        if shared and table.pool.num_free:
            source, target = table.copy_on_write(position)
            assert (source, target) == (block, table.blocks[position // BLOCK_SIZE])
            assert table.pool.references(target) == 1
            if table.pool is self.pool:
                self.overwrite([target])

    @rule(table=tables)
    def move_with_forks(self, table):
        """Move all tables that share blocks with one, however indirectly."""
        group, blocks = [table], set(table.blocks)
        for _ in self.live:
            group = [t for t in self.live if t.pool is table.pool and blocks & set(t.blocks)]
            blocks.update(block for other in group for block in other.blocks)
        target = self.host if table.pool is self.pool else self.pool
        if distinct_blocks(group) != len(blocks):
            raise AssertionError("counted wrongly")
        if len(blocks) > target.num_free:
            with pytest.raises(ValueError, match="are free"):
                move(group, target)
            return
        before = [list(other.blocks) for other in group]
        moved = dict(move(group, target))
        assert [[moved[b] for b in held] for held in before] == [list(t.blocks) for t in group]
        if target is self.pool:
            self.overwrite(moved.values())

    @rule(table=tables)
    def register(self, table):
        if table.pool is self.pool:
            for block in table.blocks:
                if block not in self.known:
                    self.known[block] = next(self.contents)
                    self.pool.register(block_key(b"", [self.known[block]]), block)

    @rule(target=tables, data=st.data())
    def reuse(self, data):
        """A table of blocks that are found by content, whether somebody holds them or not."""
        table = BlockTable(self.pool, BLOCK_SIZE)
        if self.known:
            for block in data.draw(st.sets(st.sampled_from(sorted(self.known)), max_size=3)):
                found = self.pool.find(block_key(b"", [self.known[block]]))
                assert found == block
                table.extend([found])
        self.live.append(table)
        return table

    @rule(data=st.data())
    def forget(self, data):
        if self.known:
            block = data.draw(st.sampled_from(sorted(self.known)))
            self.pool.forget([block])
            assert self.pool.find(block_key(b"", [self.known.pop(block)])) is None

    def overwrite(self, blocks):
        """Blocks that were taken hold nothing known any more."""
        for block in blocks:
            if block in self.known:
                assert self.pool.find(block_key(b"", [self.known.pop(block)])) is None

    @rule(table=consumes(tables))
    def close(self, table):
        table.release()
        assert not table.blocks
        self.live.remove(table)

    @invariant()
    def every_block_is_accounted_for(self):
        for pool in (self.pool, self.host):
            tables = [table for table in self.live if table.pool is pool]
            check_integrity(pool, tables)
            assert pool.num_used == len({block for table in tables for block in table.blocks})


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


def test_free_blocks_are_taken_before_cached_ones_and_those_by_age():
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for content, block in enumerate(blocks):
        pool.register(block_key(b"", [content]), block)
    for block in (blocks[1], blocks[0], blocks[2]):
        pool.release([block])
    (never_used,) = pool.allocate(1)
    assert never_used not in blocks
    pool.share([blocks[1]])  # used again, and so the youngest
    pool.release([blocks[1]])
    assert [pool.allocate(1)[0] for _ in range(3)] == [blocks[0], blocks[2], blocks[1]]
    assert pool.num_cached == pool.num_free == 0


def test_all_content_can_be_forgotten():
    pool = BlockPool(4)
    held, released = pool.allocate(2)
    for content, block in enumerate((held, released)):
        pool.register(block_key(b"", [content]), block)
    pool.release([released])
    pool.forget_all()
    assert pool.num_cached == 0
    assert pool.num_free == 3
    assert pool.find(block_key(b"", [0])) is None
    pool.release([held])
    check_integrity(pool, [])


@pytest.mark.parametrize("branches", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 4, 16])
def test_the_most_tokens_that_branches_have_room_for(branches, size):
    for prompt in (1, 7, 16, 33):
        for blocks in range(blocks_for_branches(branches, prompt, prompt, size), 40):
            most = tokens_for_branches(branches, prompt, blocks, size)
            assert blocks_for_branches(branches, prompt, most, size) <= blocks
            assert blocks_for_branches(branches, prompt, most + 1, size) > blocks
