"""KV memory as integers: which block belongs to whom. No tensors here."""

from pageloom.memory.pool import BlockPool, IntegrityError, check_integrity
from pageloom.memory.prefix import BlockKey, block_key, root_hash
from pageloom.memory.table import (
    BlockTable,
    blocks_for,
    blocks_for_branches,
    distinct_blocks,
    move,
    tokens_for_branches,
)

__all__ = [
    "BlockKey",
    "BlockPool",
    "BlockTable",
    "IntegrityError",
    "block_key",
    "blocks_for",
    "blocks_for_branches",
    "check_integrity",
    "distinct_blocks",
    "move",
    "root_hash",
    "tokens_for_branches",
]
