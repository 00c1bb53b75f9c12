"""What identifies the content of a block."""

from __future__ import annotations

from pageloom.memory import block_key, root_hash
from pageloom.memory.prefix import BlockKey, PrefixIndex


def test_a_key_depends_on_tokens_and_on_all_before_them():
    first, other = block_key(b"", [1, 2]), block_key(b"", [1, 3])
    keys = {block_key(parent.hash, [5, 6]) for parent in (first, other)}
    assert len({first, other, *keys}) == 4
    assert block_key(first.hash, [5, 6]) in keys


def test_salts_keep_sequences_apart():
    keys = [block_key(root_hash(salt), [1, 2]) for salt in ("", "a", "b", "a")]
    assert len(set(keys)) == 3
    assert keys[1] == keys[3]


def test_tokens_of_any_size_are_told_apart():
    assert block_key(b"", [1, 0]) != block_key(b"", [1 << 32, 0])


def test_two_contents_of_one_hash_are_not_mistaken_for_each_other():
    index = PrefixIndex()
    mine, other = BlockKey(b"same", b"", b"mine"), BlockKey(b"same", b"", b"other")
    index.add(mine, 1)
    assert index.find(mine) == 1
    assert index.find(other) is None
    assert index.find(BlockKey(b"same", b"elsewhere", b"mine")) is None
    index.add(other, 2)
    assert index.find(mine) == 1
    assert 2 not in index


def test_a_content_is_known_in_one_block():
    index = PrefixIndex()
    key = block_key(b"", [1])
    index.add(key, 1)
    index.add(key, 2)
    assert index.find(key) == 1
    index.remove(2)
    assert index.find(key) == 1
    index.remove(1)
    assert index.find(key) is None
    assert len(index) == 0
