"""One step on tensors: batch, forward pass, logits, sample."""

from __future__ import annotations

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


@dataclass(slots=True)
class ChunkResult:
    """What one chunk of a plan yielded."""

    chunk: Chunk
    token_id: int | None = None  # None if the chunk ended before the last pending token
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)


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
        """Compute the chunks and sample where a chunk completes its branch, in row order."""
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

    def _score_prompts(
        self, batch: StepBatch, hidden: torch.Tensor, results: list[ChunkResult]
    ) -> None:
        """Log-probabilities of the prompt tokens that follow each row of a chunk."""
        first_rows = batch.attention.query_start_host.tolist()
        for result, first in zip(results, first_rows, strict=False):
            request = result.chunk.branch.request
            top = request.params.prompt_logprobs
            if top is None:
                continue
            start = result.chunk.start
            stop = min(result.chunk.stop, len(request.prompt_token_ids) - 1)
            for at in range(start, stop, PROMPT_LOGPROB_ROWS):
                end = min(at + PROMPT_LOGPROB_ROWS, stop)
                rows = hidden[first + at - start : first + end - start]
                following = torch.tensor(
                    request.prompt_token_ids[at + 1 : end + 1], device=self.device
                )
                result.prompt_logprobs += self.sampler.prompt_logprobs(
                    self.model.logits(rows), following, top
                )


def _sample_row(branch: Branch) -> SampleRow:
    request = branch.request
    return SampleRow(
        request.params, request.prompt_token_ids, branch.output_token_ids, request.eos_token_ids
    )
