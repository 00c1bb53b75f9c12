"""What one step asks of a worker: integers, and by what each token is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pageloom.contract.executor import BlockPairs
from pageloom.runner.sampler import SampleRow


@dataclass(frozen=True, slots=True)
class StepArrays:
    """The sequences of a step, one after the other, those of one token first."""

    token_ids: np.ndarray  # int64 [T]
    query_start: np.ndarray  # int32 [B + 1]
    seq_lens: np.ndarray  # int32 [B]
    block_tables: np.ndarray  # int32 [B, most blocks], padded with 0


@dataclass(frozen=True, slots=True)
class DrawRow:
    """A token to be drawn after the last one of a sequence."""

    sequence: int
    sample: SampleRow


@dataclass(frozen=True, slots=True)
class BeamRow:
    """The ``count`` likeliest tokens after the last one of a sequence."""

    sequence: int
    count: int


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """Tokens that follow those of a sequence from its ``first`` on in this step, to be scored."""

    sequence: int
    first: int
    token_ids: Sequence[int]
    num_top: int


class Step:
    """Implements `pageloom.contract.Step`. ``lay_out`` is called when somebody needs the arrays,
    and until then nothing that it reads may change."""

    def __init__(
        self,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        lay_out: Callable[[], StepArrays],
        *,
        draws: Sequence[DrawRow] = (),
        beams: Sequence[BeamRow] = (),
        scored: Sequence[ScoreRow] = (),
        swapped_out: BlockPairs = (),
        swapped_in: BlockPairs = (),
        copies: BlockPairs = (),
    ) -> None:
        self.query_lens = query_lens
        self.seq_lens = seq_lens
        self._lay_out = lay_out
        self.draws = draws
        self.beams = beams
        self.scored = scored
        self.swapped_out = swapped_out
        self.swapped_in = swapped_in
        self.copies = copies

    @cached_property
    def arrays(self) -> StepArrays:
        return self._lay_out()

    @property
    def num_draws(self) -> int:
        return len(self.draws)

    @property
    def num_candidates(self) -> Sequence[int]:
        return [beam.count for beam in self.beams]

    @property
    def num_scored(self) -> Sequence[int]:
        return [len(row.token_ids) for row in self.scored]
