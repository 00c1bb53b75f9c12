"""Changes to single logits: bias, banned tokens, penalties."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

import numpy as np
import torch

from pageloom.scheduling.params import SamplingParams


class History(Protocol):
    """What a row's logits are adjusted by."""

    @property
    def params(self) -> SamplingParams: ...
    @property
    def prompt_token_ids(self) -> Sequence[int]: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...
    @property
    def eos_token_ids(self) -> Collection[int]: ...
    @property
    def mask(self) -> bytes | None: ...


def ending_tokens(row: History, vocab: int) -> list[int]:
    """The tokens of a vocabulary of ``vocab`` that end a row."""
    # Configurations may name end-of-sequence tokens that the embedding does not have.
    named = (*row.eos_token_ids, *row.params.stop_token_ids)
    return [token for token in named if 0 <= token < vocab]


def adjust_logits(logits: torch.Tensor, rows: Sequence[History]) -> None:
    """Apply bias, bans and then penalties to ``logits`` (float32 [S, V]), in place.

    Only the logits that change are touched, so the cost is that of the tokens named by the rows
    that ask for something, whatever the vocabulary.
    """
    _add_bias(logits, rows)
    _penalize(logits, rows)


def _add_bias(logits: torch.Tensor, rows: Sequence[History]) -> None:
    """Logit bias, and -inf for the tokens that would end a row before ``min_tokens``. Those with
    a mask are not banned here: `apply_masks` knows whether anything else may follow."""
    at: list[int] = []
    token_ids: list[int] = []
    biases: list[float] = []
    for i, row in enumerate(rows):
        bias = dict(row.params.logit_bias or {})
        if row.mask is None and len(row.output_token_ids) < row.params.min_tokens:
            bias.update(dict.fromkeys(ending_tokens(row, logits.shape[1]), -math.inf))
        at += [i] * len(bias)
        token_ids += bias.keys()
        biases += bias.values()
    if at:
        index = torch.tensor([at, token_ids], device=logits.device)
        added = torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        logits[index[0], index[1]] += added


def _penalize(logits: torch.Tensor, rows: Sequence[History]) -> None:
    """Repetition penalty over prompt and output, then frequency and presence over the output."""
    at: list[int] = []
    lengths: list[int] = []
    token_ids: list[int] = []
    counts: list[int] = []
    penalties: list[tuple[float, float, float]] = []
    for i, row in enumerate(rows):
        params = row.params
        penalty = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        if penalty == (1.0, 0.0, 0.0):
            continue
        prompt = row.prompt_token_ids if params.repetition_penalty != 1.0 else ()
        seen = dict.fromkeys(prompt, 0)
        seen.update(Counter(row.output_token_ids))
        at.append(i)
        lengths.append(len(seen))
        token_ids += seen.keys()
        counts += seen.values()
        penalties.append(penalty)
    if not token_ids:
        return
    # numpy turns long lists into arrays several times faster than torch.
    index = np.array([np.repeat(at, lengths), token_ids, counts], dtype=np.int64)
    per_token = np.repeat(np.array(penalties, dtype=np.float32), lengths, axis=0)
    row_ids, columns, occurrences = torch.from_numpy(index).to(logits.device)
    repetition, frequency, presence = torch.from_numpy(per_token).to(logits.device).unbind(1)
    value = logits[row_ids, columns]
    value = torch.where(value > 0, value / repetition, value * repetition)
    value -= frequency * occurrences + presence * (occurrences > 0)
    logits[row_ids, columns] = value
