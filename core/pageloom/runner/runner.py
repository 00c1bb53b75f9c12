"""One step on tensors: move blocks, forward pass, logits, sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pageloom.contract import AttentionBackend, StepOutput
from pageloom.models.model import Attend, Model
from pageloom.runner.batch import StepBatch, assemble_batch
from pageloom.runner.graphs import DecodeGraphs
from pageloom.runner.sampler import Sampler
from pageloom.runner.step import BeamRow, DrawRow, ScoreRow, Step

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


class ModelRunner:
    """Runs steps on one rank's part of the model. Between steps it keeps the backend's cache, and
    what of it is swapped out to the host."""

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
        self.rank = model.group.rank
        # Takes memory only as its blocks are written.
        self._host = torch.empty(host_blocks, backend.bytes_per_block(), dtype=torch.uint8)

    @torch.inference_mode()
    def run(self, step: Step) -> StepOutput | None:
        """Move blocks as the step says, compute its sequences, and draw what it asks for; None on
        ranks that do not draw. Where nothing can be read from logits, that draw fails alone."""
        computed = self.compute(step)
        output = StepOutput()
        if computed is not None and self.rank.is_last:
            batch, hidden = computed
            self._sample(step, batch, hidden, output)
            starts = batch.attention.query_start_host
            for row in step.scored:
                self._score(row, hidden[int(starts[row.sequence]) + row.first :], output)
        return output if self.rank.answers else None

    @torch.inference_mode()
    def compute(self, step: Step) -> tuple[StepBatch, torch.Tensor] | None:
        """What `run` does before anything is drawn: move blocks, and compute the sequences.

        Returns the batch and the final hidden states of its rows, ``[T, hidden_size]``, valid until
        the next step; None if the step has no sequences.
        """
        self._move_blocks(step)
        if not step.query_lens:
            return None
        batch = assemble_batch(step.arrays, self.backend.spec.block_size)
        return batch, self._forward(batch)

    def _move_blocks(self, step: Step) -> None:
        # Whoever gives way may leave its blocks to whoever comes back, on both sides: read, then
        # write.
        outgoing, incoming = step.swapped_out, step.swapped_in
        if incoming:
            coming = self._host[[source for source, _ in incoming]]
        if outgoing:
            going = self.backend.read_blocks([source for source, _ in outgoing])
            self._host[[target for _, target in outgoing]] = going
        if incoming:
            self.backend.write_blocks([target for _, target in incoming], coming)
        if step.copies:
            self.backend.copy_blocks(step.copies)

    def _forward(self, batch: StepBatch) -> torch.Tensor:
        """The hidden states ``[T, hidden_size]`` of a step, valid until the next."""
        if self.graphs is not None and self.graphs.hold(batch):
            return self.graphs.run(batch)
        batch = batch.to(self.device)
        self.backend.plan(batch.attention)
        return self.model.forward(batch.token_ids, batch.positions, Attend.of(self.backend))

    def _sample(
        self, step: Step, batch: StepBatch, hidden: torch.Tensor, output: StepOutput
    ) -> None:
        """Draws and candidates. Every sequence that wants any has one row of logits."""
        wanted = {draw.sequence for draw in step.draws} | {beam.sequence for beam in step.beams}
        sequences = sorted(wanted)
        if not sequences:
            return
        if len(sequences) < len(hidden):
            hidden = hidden[batch.last_rows[sequences].to(self.device)]
        logits = self.model.logits(hidden)
        if not self.rank.answers:
            return
        row_of = {sequence: row for row, sequence in enumerate(sequences)}
        output.candidates = self._rank(logits, step.beams, row_of)
        if step.draws:
            rows = [row_of[draw.sequence] for draw in step.draws]
            self._draw(_take(logits, rows), step.draws, output)

    def _rank(
        self, logits: torch.Tensor, beams: Sequence[BeamRow], row_of: dict[int, int]
    ) -> list[list[tuple[int, float]] | None]:
        """Candidates of each beam; None where the logits cannot be read."""
        # Which of equal logits are likeliest may depend on how many are asked for, so rows that
        # ask for more must not decide for others.
        found: dict[int, list[tuple[int, float]] | None] = {}
        for count in {beam.count for beam in beams}:
            rows = [row_of[beam.sequence] for beam in beams if beam.count == count]
            candidates = self.sampler.candidates(_take(logits, rows), count)
            found.update(zip(rows, candidates, strict=True))
        return [found[row_of[beam.sequence]] for beam in beams]

    def _draw(self, logits: torch.Tensor, drawing: Sequence[DrawRow], output: StepOutput) -> None:
        """A token for each row of logits, which are overwritten."""
        sampled = self.sampler.sample(logits, [draw.sample for draw in drawing])
        output.token_ids, output.logprobs = sampled.token_ids, list(sampled.logprobs)
        for row in sampled.invalid:
            banned = bool(logits[row].isneginf().all())  # in the logits as `sample` changed them
            output.failures[row] = ALL_BANNED if banned else f"no token can be drawn: {NAN}"

    def _score(self, row: ScoreRow, hidden: torch.Tensor, output: StepOutput) -> None:
        """Log-probabilities of following tokens; ``hidden`` begins with whom the first follows."""
        scores = []
        for at in range(0, len(row.token_ids), PROMPT_LOGPROB_ROWS):
            token_ids = row.token_ids[at : at + PROMPT_LOGPROB_ROWS]
            logits = self.model.logits(hidden[at : at + len(token_ids)])
            if self.rank.answers:
                following = torch.tensor(token_ids, device=self.device)
                scores += self.sampler.prompt_logprobs(logits, following, row.num_top)
        output.scores.append(scores)


def _take(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """``logits[rows]``, without a copy if that is all of them."""
    if rows == list(range(len(logits))):
        return logits
    return logits[torch.tensor(rows, device=logits.device)]
