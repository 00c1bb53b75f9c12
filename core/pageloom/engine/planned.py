"""Between a plan of requests and a step of integers, on the way there and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pageloom.contract import StepOutput
from pageloom.runner.runner import NAN
from pageloom.runner.sampler import SampleRow
from pageloom.runner.step import BeamRow, DrawRow, ScoreRow, Step, StepArrays
from pageloom.scheduling import Chunk, StepPlan
from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.scheduling.structured import GuideError


@dataclass(frozen=True, slots=True)
class Draw:
    """A next token, drawn by a request's `SamplingParams`."""

    token_id: int
    logprobs: TokenLogprobs | None


@dataclass(slots=True)
class ChunkResult:
    """What one chunk of a plan yielded.

    ``draws`` has a token for each of ``chunk.draws``; a beam's has none, but ``candidates``, the
    likeliest next tokens with their log-probabilities. A failed chunk has neither.

    ``prompt_logprobs`` scores the tokens of the prompt that follow the chunk's, up to the next
    chunk's first. Tokens that were scored before a preemption are not scored again, so the lists
    of a branch's chunks, one after the other, are the whole prompt's without gap or overlap.
    """

    chunk: Chunk
    draws: list[Draw] = field(default_factory=list)
    candidates: list[tuple[int, float]] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    failure: str | None = None  # a sentence for the operator: why the request cannot go on

    def fail(self, reason: str) -> None:
        """Give up what the chunk yielded, for ``reason``."""
        self.draws, self.candidates, self.prompt_logprobs = [], [], []
        self.failure = reason


class PlannedStep:
    """A plan, the step that it is for workers, and what they make of it.

    What the step reads of requests it reads when it is made, but for the tokens and block tables:
    those must stay as they are until it is submitted.
    """

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        # Chunks of one token first, as backends want them.
        chunks = sorted(plan.chunks, key=lambda chunk: chunk.num_tokens != 1)
        self._results = [ChunkResult(chunk) for chunk in chunks]
        draws: list[DrawRow] = []
        beams: list[BeamRow] = []
        scored: list[ScoreRow] = []
        self._drawing: list[ChunkResult] = []  # by draw
        self._searching: list[ChunkResult] = []  # by beam
        self._scoring: list[ChunkResult] = []  # by scored sequence
        for sequence, result in enumerate(self._results):
            chunk = result.chunk
            request = chunk.branch.request
            if chunk.draws and request.beams is not None:
                beams.append(BeamRow(sequence, request.beams.num_candidates))
                self._searching.append(result)
            elif chunk.draws and (samples := _sample_rows(result)):
                draws += [DrawRow(sequence, sample) for sample in samples]
                self._drawing += [result] * len(samples)
            if request.params.prompt_logprobs is not None and result.failure is None:
                row = _score_row(sequence, chunk)
                if row.token_ids:
                    scored.append(row)
                    self._scoring.append(result)
        self.step = Step(
            [chunk.num_tokens for chunk in chunks],
            [chunk.stop for chunk in chunks],
            lambda: _lay_out(chunks),
            draws=draws,
            beams=beams,
            scored=scored,
            swapped_out=plan.swapped_out,
            swapped_in=plan.swapped_in,
            copies=plan.copies,
        )

    @property
    def is_empty(self) -> bool:
        """Whether workers have nothing to do for it."""
        plan = self.plan
        return not (plan.chunks or plan.swapped_out or plan.swapped_in or plan.copies)

    def results(self, output: StepOutput) -> list[ChunkResult]:
        """What came of each chunk, those of one token first. A chunk from whose logits nothing can
        be read fails alone, see `ChunkResult.failure`."""
        for result, token_id, logprobs in zip(
            self._drawing, output.token_ids, output.logprobs, strict=True
        ):
            result.draws.append(Draw(token_id, logprobs))
        for index, reason in output.failures.items():
            self._drawing[index].fail(reason)
        for result, candidates in zip(self._searching, output.candidates, strict=True):
            if candidates is None:
                result.fail(f"no beam can go on: {NAN}")
            else:
                result.candidates = candidates
        for result, scores in zip(self._scoring, output.scores, strict=True):
            if result.failure is None:
                _take_scores(result, scores)
        return self._results


def _sample_rows(result: ChunkResult) -> list[SampleRow]:
    """By what each of a chunk's tokens is drawn; none, and a failed result, if nobody knows what
    may follow."""
    chunk = result.chunk
    branch, request = chunk.branch, chunk.branch.request
    try:
        mask = branch.guide.mask() if branch.guide is not None else None
    except GuideError as error:
        result.fail(f"no token can be drawn by its grammar: {error}")
        return []
    return [
        SampleRow(
            request.params,
            request.prompt_token_ids,
            branch.output_token_ids,
            request.eos_token_ids,
            branch.index + number,
            mask,
        )
        for number in range(chunk.draws)
    ]


def _score_row(sequence: int, chunk: Chunk) -> ScoreRow:
    request = chunk.branch.request
    start = _first_scored(chunk)
    stop = max(start, min(chunk.stop, len(request.prompt_token_ids) - 1))
    return ScoreRow(
        sequence,
        start - chunk.start,
        request.prompt_token_ids[start + 1 : stop + 1],
        request.params.prompt_logprobs or 0,
    )


def _first_scored(chunk: Chunk) -> int:
    """The position of the chunk's first token whose successor was not scored before, by a step
    before a preemption."""
    return max(chunk.start, chunk.branch.recompute_until)


def _take_scores(result: ChunkResult, scores: Sequence[TokenLogprobs]) -> None:
    for position, score in enumerate(scores, _first_scored(result.chunk) + 1):
        if math.isnan(score.logprob):
            where = f"the prompt token at position {position} cannot be scored"
            return result.fail(f"{where}: {NAN}")
    result.prompt_logprobs += scores
    return None


def _lay_out(chunks: Sequence[Chunk]) -> StepArrays:
    query_start = np.zeros(len(chunks) + 1, dtype=np.int32)
    np.cumsum([chunk.num_tokens for chunk in chunks], out=query_start[1:])
    token_ids = np.empty(query_start[-1], dtype=np.int64)
    for chunk, first in zip(chunks, query_start.tolist(), strict=False):
        token_ids[first : first + chunk.num_tokens] = chunk.branch.tokens(chunk.start, chunk.stop)
    tables = [np.frombuffer(chunk.branch.table.blocks, dtype=np.int32) for chunk in chunks]
    padded = np.zeros((len(tables), max(map(len, tables), default=0)), dtype=np.int32)
    for row, table in zip(padded, tables, strict=True):
        row[: len(table)] = table
    return StepArrays(
        token_ids=token_ids,
        query_start=query_start,
        seq_lens=np.array([chunk.stop for chunk in chunks], dtype=np.int32),
        block_tables=padded,
    )
