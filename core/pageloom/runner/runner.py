"""One step on tensors: batch, forward pass, logits, sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from pageloom.contract import AttentionBackend
from pageloom.models.model import Attend, Model
from pageloom.runner.batch import StepBatch, assemble_batch
from pageloom.runner.graphs import DecodeGraphs
from pageloom.runner.sampler import Sampler, SampleRow
from pageloom.scheduling import Chunk, StepPlan
from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.scheduling.structured import GuideError

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
        """Raises `GuideError` if nobody knows what may follow."""
        branch = self.result.chunk.branch
        request = branch.request
        return SampleRow(
            request.params,
            request.prompt_token_ids,
            branch.output_token_ids,
            request.eos_token_ids,
            self.index,
            branch.guide.mask() if branch.guide is not None else None,
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
        graphs: DecodeGraphs | None = None,
    ) -> None:
        """``host_blocks`` is the size of the planner's host pool. ``graphs``, if any, compute the
        steps that fit them; they are of the same model and backend."""
        self.model = model
        self.backend = backend
        self.sampler = sampler
        self.device = device
        self.graphs = graphs
        # Takes memory only as its blocks are written.
        self._host = torch.empty(host_blocks, backend.bytes_per_block(), dtype=torch.uint8)

    @torch.inference_mode()
    def run(self, plan: StepPlan) -> list[ChunkResult]:
        """Move blocks as the plan says, compute its chunks, and draw where one completes its
        branch. Results are in row order: chunks of one token first.

        A chunk from whose logits nothing can be read fails alone, see `ChunkResult.failure`.
        """
        computed = self.compute(plan)
        if computed is None:
            return []
        batch, hidden = computed
        results = [ChunkResult(chunk) for chunk in batch.chunks]
        self._sample(batch, hidden, results)
        self._score_prompts(batch, hidden, results)
        return results

    @torch.inference_mode()
    def compute(self, plan: StepPlan) -> tuple[StepBatch, torch.Tensor] | None:
        """What `run` does before anything is drawn: move blocks, and compute the chunks.

        Returns the batch and the final hidden states of its rows, ``[T, hidden_size]``, valid until
        the next step; None if the plan has no chunks.
        """
        self._move_blocks(plan)
        if not plan.chunks:
            return None
        batch = assemble_batch(plan.chunks, self.backend.spec.block_size)
        return batch, self._forward(batch)

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

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        """The hidden states ``[T, hidden_size]`` of a step, valid until the next."""
        if self.graphs is not None and self.graphs.hold(batch):
            return self.graphs.run(batch)
        batch = batch.to(self.device)
        self.backend.plan(batch.attention)
        return self.model.forward(batch.token_ids, batch.positions, Attend.of(self.backend))

    def _sample(self, batch: StepBatch, hidden: torch.Tensor, results: list[ChunkResult]) -> None:
        sampling = [i for i, chunk in enumerate(batch.chunks) if chunk.draws]
        if not sampling:
            return
        if len(sampling) < len(hidden):
            hidden = hidden[batch.last_rows[sampling].to(self.device)]
        logits = self.model.logits(hidden)
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
        rows, stuck = _sample_rows(drawing)
        if stuck:
            kept = [i for i in range(len(drawing)) if i not in stuck]
            logits, drawing = logits[kept], [drawing[i] for i in kept]
        if not rows:
            return
        sampled = self.sampler.sample(logits, rows)
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


def _sample_rows(drawing: Sequence[_DrawRow]) -> tuple[list[SampleRow], set[int]]:
    """What each is drawn by; and those, already failed, for which there is no such row."""
    rows: list[SampleRow] = []
    stuck: set[int] = set()
    for i, draw in enumerate(drawing):
        try:
            rows.append(draw.sample_row())
        except GuideError as error:
            stuck.add(i)
            draw.result.fail(f"no token can be drawn by its grammar: {error}")
    return rows, stuck


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """``logits[rows]``, without a copy if that is all of them."""
    if rows == list(range(len(logits))):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]
