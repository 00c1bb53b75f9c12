"""From a step plan to the tensors that the model and the attention backend read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from pageloom.contract import AttentionBatch
from pageloom.scheduling import Chunk


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of a step, concatenated. ``chunks`` are in the order of their rows."""

    chunks: Sequence[Chunk]
    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionBatch

    @property
    def last_rows(self) -> torch.Tensor:
        """The row of each chunk's last token, int64 ``[B]`` on the CPU."""
        return self.attention.query_start_host[1:].long() - 1

    def to(self, device: torch.device) -> StepBatch:
        """The same batch, what is not for the host on ``device``."""
        if device.type == "cpu":
            return self
        tensors = ("query_start", "seq_lens", "block_tables", "slots")
        moved = {name: getattr(self.attention, name).to(device) for name in tensors}
        return replace(
            self,
            token_ids=self.token_ids.to(device),
            positions=self.positions.to(device),
            attention=replace(self.attention, **moved),
        )


def assemble_batch(chunks: Sequence[Chunk], block_size: int) -> StepBatch:
    """Lay out ``chunks``, decodes first, with slots and block tables for the backend.

    All is on the CPU, built in numpy, since a step has many small arrays.
    """
    chunks = sorted(chunks, key=lambda chunk: chunk.num_tokens != 1)
    counts = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
    starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
    query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum(counts, out=query_start[1:])
    row_of_token = np.repeat(np.arange(len(chunks)), counts)
    offset_in_chunk = np.arange(query_start[-1]) - query_start[row_of_token]
    positions = starts[row_of_token] + offset_in_chunk

    tables = _block_tables(chunks)
    slots = tables[row_of_token, positions // block_size].astype(np.int64)
    slots = slots * block_size + positions % block_size
    token_ids = np.empty(len(positions), dtype=np.int64)
    for chunk, first in zip(chunks, query_start.tolist(), strict=False):
        token_ids[first : first + chunk.num_tokens] = chunk.branch.tokens(chunk.start, chunk.stop)

    starts_of_rows = torch.from_numpy(query_start)
    seq_lens = torch.from_numpy((starts + counts).astype(np.int32))
    return StepBatch(
        chunks=chunks,
        token_ids=torch.from_numpy(token_ids),
        positions=torch.from_numpy(positions),
        attention=AttentionBatch(
            query_start=starts_of_rows,
            seq_lens=seq_lens,
            block_tables=torch.from_numpy(tables),
            slots=torch.from_numpy(slots),
            query_start_host=starts_of_rows,
            seq_lens_host=seq_lens,
            num_decodes=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
        ),
    )


def _block_tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """``int32 [B, most blocks]``, padded with 0."""
    tables = [np.frombuffer(chunk.branch.table.blocks, dtype=np.int32) for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
