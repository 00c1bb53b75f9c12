"""KV memory as integers: which block belongs to whom. No tensors here."""

from pageloom.memory.pool import BlockPool, IntegrityError, check_integrity
from pageloom.memory.table import BlockTable, blocks_for

__all__ = ["BlockPool", "BlockTable", "IntegrityError", "blocks_for", "check_integrity"]
