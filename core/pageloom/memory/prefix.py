"""What full blocks hold, by content."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import sha256
from typing import NamedTuple


class BlockKey(NamedTuple):
    """The content of a full block: its tokens, and by the parent's hash all tokens before them."""

    hash: bytes
    parent: bytes
    tokens: bytes  # int64 each


def root_hash(salt: str) -> bytes:
    """What the first block of a sequence has as parent; sequences of different salts never
    match."""
    return sha256(salt.encode()).digest() if salt else b""


def block_key(parent: bytes, token_ids: Sequence[int]) -> BlockKey:
    """The key of the block that holds ``token_ids`` and follows the block of hash ``parent``."""
    tokens = array("q", token_ids).tobytes()
    return BlockKey(sha256(parent + tokens).digest(), parent, tokens)


class PrefixIndex:
    """Which block holds what: one block per content, one content per block."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._key_of: dict[int, BlockKey] = {}

    def __len__(self) -> int:
        return len(self._key_of)

    def __contains__(self, block: object) -> bool:
        return block in self._key_of

    def find(self, key: BlockKey) -> int | None:
        """The block that holds ``key``. Token ids are compared, so two blocks of one hash are not
        mistaken for each other."""
        block = self._block_of.get(key.hash)
        return block if block is not None and self._key_of[block] == key else None

    def add(self, key: BlockKey, block: int) -> None:
        """Note what ``block`` holds, unless a block of the same hash is there already."""
        if block not in self._key_of and key.hash not in self._block_of:
            self._block_of[key.hash] = block
            self._key_of[block] = key

    def remove(self, block: int) -> None:
        """Forget what ``block`` holds, if it is known."""
        key = self._key_of.pop(block, None)
        if key is not None:
            del self._block_of[key.hash]
