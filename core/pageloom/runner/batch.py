"""From the arrays of a step to the tensors that the model and the attention backend read."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from pageloom.contract import AttentionBatch
from pageloom.runner.step import StepArrays


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tokens of a step, concatenated."""

    token_ids: torch.Tensor  # int64 [T]
    positions: torch.Tensor  # int64 [T]
    attention: AttentionBatch

    @property
    def last_rows(self) -> torch.Tensor:
        """The row of each sequence's last token, int64 ``[B]`` on the CPU."""
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


def assemble_batch(arrays: StepArrays, block_size: int) -> StepBatch:
    """With positions and slots. All is on the CPU, built in numpy, since a step has many small
    arrays."""
    query_start, seq_lens, tables = arrays.query_start, arrays.seq_lens, arrays.block_tables
    counts = np.diff(query_start)
    row_of_token = np.repeat(np.arange(len(counts)), counts)
    starts = (seq_lens - counts).astype(np.int64)
    positions = starts[row_of_token] + np.arange(query_start[-1]) - query_start[row_of_token]
    slots = tables[row_of_token, positions // block_size].astype(np.int64)
    slots = slots * block_size + positions % block_size
    starts_of_rows, lens_of_rows = torch.from_numpy(query_start), torch.from_numpy(seq_lens)
    return StepBatch(
        token_ids=torch.from_numpy(arrays.token_ids),
        positions=torch.from_numpy(positions),
        attention=AttentionBatch(
            query_start=starts_of_rows,
            seq_lens=lens_of_rows,
            block_tables=torch.from_numpy(tables),
            slots=torch.from_numpy(slots),
            query_start_host=starts_of_rows,
            seq_lens_host=lens_of_rows,
            num_decodes=int((counts == 1).sum()),
            max_query_len=int(counts.max()),
            max_seq_len=int(seq_lens.max()),
        ),
    )
