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
from pageloom.scheduling import Branch, Chunk
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


@dataclass(slots=True)
class ChunkResult:
    """What one chunk of a plan yielded.

    ``prompt_logprobs[i]`` scores the prompt token at position ``prompt_logprobs_start + 1 + i``.
    Tokens that were scored before a preemption are not scored again, so the lists of a branch's
    chunks, one after the other, are the whole prompt's without gap or overlap.
    """

    chunk: Chunk
    token_id: int | None = None  # None if the chunk ended before the last pending token, or failed
    logprobs: TokenLogprobs | None = None
    prompt_logprobs_start: int = 0
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    failure: str | None = None  # a sentence for the operator: why the request cannot go on

    def fail(self, reason: str) -> None:
        """Give up what the chunk yielded, for ``reason``."""
        self.token_id, self.logprobs, self.prompt_logprobs = None, None, []
        self.failure = reason


class ModelRunner:
    """Runs committed plans. Stateless between steps but for the backend's cache."""

    def __init__(
        self,
        model: Model,
        backend: AttentionBackend,
        sampler: Sampler,
        device: torch.device,
    ) -> None:
        self.model = model
        self.backend = backend
        self.sampler = sampler
        self.device = device

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk]) -> list[ChunkResult]:
        """Compute the chunks and sample where a chunk completes its branch, in row order.

        A chunk from whose logits nothing can be read fails alone, see `ChunkResult.failure`.
        """
        batch = assemble_batch(chunks, self.backend.spec.block_size, self.device)
        self.backend.plan(batch.attention)
        hidden = self.model.forward(batch.token_ids, batch.positions, self.backend.forward)
        results = [ChunkResult(chunk) for chunk in batch.chunks]
        self._sample(batch, hidden, results)
        self._score_prompts(batch, hidden, results)
        return results

    def _sample(self, batch: StepBatch, hidden: torch.Tensor, results: list[ChunkResult]) -> None:
        sampling = [i for i, chunk in enumerate(batch.chunks) if chunk.samples]
        if not sampling:
            return
        rows = batch.last_rows
        if len(sampling) < len(batch.chunks):
            rows = rows[torch.tensor(sampling, device=self.device)]
        logits = self.model.logits(hidden if len(rows) == len(hidden) else hidden[rows])
        branches = [batch.chunks[i].branch for i in sampling]
        sampled = self.sampler.sample(logits, [_sample_row(branch) for branch in branches])
        for i, token_id, logprobs in zip(
            sampling, sampled.token_ids, sampled.logprobs, strict=True
        ):
            results[i].token_id, results[i].logprobs = token_id, logprobs
        for row in sampled.invalid:
            banned = bool(logits[row].isneginf().all())  # in the logits as `sample` changed them
            results[sampling[row]].fail(ALL_BANNED if banned else f"no token can be drawn: {NAN}")

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
        result.prompt_logprobs_start = start
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


def _sample_row(branch: Branch) -> SampleRow:
    request = branch.request
    return SampleRow(
        request.params, request.prompt_token_ids, branch.output_token_ids, request.eos_token_ids
    )
