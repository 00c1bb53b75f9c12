"""From a step plan to the tensors that the model and the attention backend read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
    last_rows: torch.Tensor  # int64 [B], the row of each chunk's last token
    attention: AttentionBatch


def assemble_batch(chunks: Sequence[Chunk], block_size: int, device: torch.device) -> StepBatch:
    """Lay out ``chunks``, decodes first, with slots and block tables for the backend.

    The arrays are built in numpy, since a step has many small ones, and each is moved to
    ``device`` once.
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

    query_start_host = torch.from_numpy(query_start)
    seq_lens_host = torch.from_numpy((starts + counts).astype(np.int32))
    return StepBatch(
        chunks=chunks,
        token_ids=torch.from_numpy(token_ids).to(device),
        positions=torch.from_numpy(positions).to(device),
        last_rows=torch.from_numpy(query_start[1:].astype(np.int64) - 1).to(device),
        attention=AttentionBatch(
            query_start=query_start_host.to(device),
            seq_lens=seq_lens_host.to(device),
            block_tables=torch.from_numpy(tables).to(device),
            slots=torch.from_numpy(slots).to(device),
            query_start_host=query_start_host,
            seq_lens_host=seq_lens_host,
            num_decodes=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens_host.max()),
        ),
    )


def _block_tables(chunks: Sequence[Chunk]) -> np.ndarray:
    """``int32 [B, most blocks]``, padded with 0."""
    tables = [np.frombuffer(chunk.branch.table.blocks, dtype=np.int32) for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return padded
