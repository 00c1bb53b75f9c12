"""One step on tensors: batch, forward pass, logits, sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pageloom.contract import AttentionBackend
from pageloom.models.model import Model
from pageloom.runner.batch import StepBatch, assemble_batch
from pageloom.runner.sampler import Sampler, SampleRow
from pageloom.scheduling import Chunk, StepPlan
from pageloom.scheduling.logprobs import TokenLogprobs

# Rows of logits held at once for prompt logprobs: 256 rows of 128k float32 are 128 MiB.
PROMPT_LOGPROB_ROWS = 256

NAN = (
    "the model's logits hold NaN or infinity; check its weights and dtype (float16 overflows "
    "where bfloat16 does not)"
)
ALL_BANNED = (
    "no token can be drawn: the model or the request excludes every token of the vocabulary; "
    "check the model's weights, and lower min_tokens or name fewer stop_token_ids"
)


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


@dataclass(frozen=True, slots=True)
class _DrawRow:
    row: int  # of the logits
    result: ChunkResult
    index: int  # of the branch that the token is for

    def sample_row(self) -> SampleRow:
        branch = self.result.chunk.branch
        request = branch.request
        return SampleRow(
            request.params,
            request.prompt_token_ids,
            branch.output_token_ids,
            request.eos_token_ids,
            self.index,
        )


class ModelRunner:
    """Runs committed plans. Between steps it keeps the backend's cache, and what of it is swapped
    out to the host."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        sampler: Sampler,
        device: torch.device,
        host_blocks: int = 0,
    ) -> None:
        """``host_blocks`` is the size of the planner's host pool."""
        self.model = model
        self.backend = backend
        self.sampler = sampler
        self.device = device
        # Takes memory only as its blocks are written.
        self._host = torch.empty(host_blocks, backend.bytes_per_block(), dtype=torch.uint8)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """Move blocks as the plan says, compute its chunks, and draw where one completes its
        branch. Results are in row order: chunks of one token first.

        A chunk from whose logits nothing can be read fails alone, see `ChunkResult.failure`.
        """
        self._move_blocks(plan)
        if not plan.chunks:
            return []
        batch = assemble_batch(plan.chunks, self.backend.spec.block_size, self.device)
        self.backend.plan(batch.attention)
        hidden = self.model.forward(batch.token_ids, batch.positions, self.backend.forward)
        results = [ChunkResult(chunk) for chunk in batch.chunks]
        self._sample(batch, hidden, results)
        self._score_prompts(batch, hidden, results)
        return results

    def _move_blocks(self, plan: StepPlan) -> None:
        # Whoever gives way may leave its blocks to whoever comes back, on both sides: read, then
        # write.
        outgoing, incoming = plan.swapped_out, plan.swapped_in
        if incoming:
            coming = self._host[[source for source, _ in incoming]]
        if outgoing:
            going = self.backend.read_blocks([source for source, _ in outgoing])
            self._host[[target for _, target in outgoing]] = going
        if incoming:
            self.backend.write_blocks([target for _, target in incoming], coming)
        if plan.copies:
            self.backend.copy_blocks(plan.copies)

    def _sample(self, batch: StepBatch, hidden: torch.Tensor, results: list[ChunkResult]) -> None:
        sampling = [i for i, chunk in enumerate(batch.chunks) if chunk.draws]
        if not sampling:
            return
        rows = batch.last_rows
        if len(sampling) < len(batch.chunks):
            rows = rows[torch.tensor(sampling, device=self.device)]
        logits = self.model.logits(hidden if len(rows) == len(hidden) else hidden[rows])
        drawing: list[_DrawRow] = []
        beams: dict[int, list[tuple[int, ChunkResult]]] = {}  # by number of candidates
        for row, i in enumerate(sampling):
            branch, draws = batch.chunks[i].branch, batch.chunks[i].draws
            if (search := branch.request.beams) is not None:
                # Which of equal logits are likeliest may depend on how many are asked for, so
                # rows that ask for more must not decide for others.
                beams.setdefault(search.num_candidates, []).append((row, results[i]))
            else:
                drawing += [_DrawRow(row, results[i], branch.index + n) for n in range(draws)]
        for count, ranked in beams.items():
            of_beams = _take(logits, [row for row, _ in ranked])
            self._rank(of_beams, count, [result for _, result in ranked])
        if drawing:
            self._draw(_take(logits, [draw.row for draw in drawing]), drawing)

    def _rank(self, logits: torch.Tensor, count: int, results: Sequence[ChunkResult]) -> None:
        """``count`` candidates of beams, a row of logits each."""
        for result, found in zip(results, self.sampler.candidates(logits, count), strict=True):
            if found is None:
                result.fail(f"no beam can go on: {NAN}")
            else:
                result.candidates = found

    def _draw(self, logits: torch.Tensor, drawing: Sequence[_DrawRow]) -> None:
        """A token for each row of logits."""
        sampled = self.sampler.sample(logits, [draw.sample_row() for draw in drawing])
        for draw, token_id, logprobs in zip(
            drawing, sampled.token_ids, sampled.logprobs, strict=True
        ):
            draw.result.draws.append(Draw(token_id, logprobs))
        for row in sampled.invalid:
            banned = bool(logits[row].isneginf().all())  # in the logits as `sample` changed them
            drawing[row].result.fail(ALL_BANNED if banned else f"no token can be drawn: {NAN}")

    def _score_prompts(
        self, batch: StepBatch, hidden: torch.Tensor, results: list[ChunkResult]
    ) -> None:
        """Log-probabilities of the prompt tokens that follow each row of a chunk."""
        starts = batch.attention.query_start_host.tolist()
        for result, first, end in zip(results, starts, starts[1:], strict=False):
            wanted = result.chunk.branch.request.params.prompt_logprobs is not None
            if wanted and result.failure is None:
                self._score_prompt(result, hidden[first:end])

    def _score_prompt(self, result: ChunkResult, hidden: torch.Tensor) -> None:
        chunk, request = result.chunk, result.chunk.branch.request
        # What was computed before a preemption was scored then.
        start = max(chunk.start, chunk.branch.recompute_until)
        stop = min(chunk.stop, len(request.prompt_token_ids) - 1)
        for at in range(start, stop, PROMPT_LOGPROB_ROWS):
            end = min(at + PROMPT_LOGPROB_ROWS, stop)
            logits = self.model.logits(hidden[at - chunk.start : end - chunk.start])
            following = torch.tensor(request.prompt_token_ids[at + 1 : end + 1], device=self.device)
            top = request.params.prompt_logprobs or 0
            scored = self.sampler.prompt_logprobs(logits, following, top)
            for position, score in enumerate(scored, at + 1):
                if math.isnan(score.logprob):
                    where = f"the prompt token at position {position} cannot be scored"
                    return result.fail(f"{where}: {NAN}")
            result.prompt_logprobs += scored
        return None


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """``logits[rows]``, without a copy if that is all of them."""
    if rows == list(range(len(logits))):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]
