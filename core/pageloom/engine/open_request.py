"""A request as its client sees it: text going out, chunk by chunk."""

from __future__ import annotations

from collections import deque

from pageloom.engine.detokenizer import Detokenizer
from pageloom.engine.outputs import CompletionChunk, CompletionOutput, RequestOutput
from pageloom.runner.runner import ChunkResult
from pageloom.scheduling import FinishReason, Request
from pageloom.scheduling.logprobs import TokenLogprobs


class OpenRequest:
    """Turns a request's sampled tokens into chunks, and keeps those nobody has taken yet."""

    def __init__(self, request: Request, prompt: str | None, detokenizer: Detokenizer | None):
        self.request = request
        self.prompt = prompt
        self.detokenizer = detokenizer
        self.chunks: deque[CompletionChunk] = deque()
        self.prompt_logprobs: list[TokenLogprobs] = []

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def receive(self, result: ChunkResult) -> CompletionChunk | None:
        """Take in what a step computed for this request; the tokens are on its branch already.

        Returns the chunk to send, with a finish reason if the branch ends here.
        """
        # After a preemption the prompt is scored again; what is known is kept.
        known = len(self.prompt_logprobs) - result.chunk.start
        self.prompt_logprobs += result.prompt_logprobs[max(0, known) :]
        if result.token_id is None:
            return None
        params, branch = self.request.params, result.chunk.branch
        chunk = CompletionChunk(self.request.request_id, branch.index, token_ids=[result.token_id])
        if result.logprobs is not None:
            chunk.logprobs = [result.logprobs]
        chunk.finish_reason = self.request.stop_reason_of(branch)
        stopped_by_token = chunk.finish_reason == "stop"
        if stopped_by_token and result.token_id in params.stop_token_ids:
            chunk.stop_reason = result.token_id
        if self.detokenizer is not None:
            if not stopped_by_token or params.include_stop_str_in_output:
                chunk.text = self.detokenizer.append(result.token_id)
            if chunk.finish_reason is not None and self.detokenizer.stopped is None:
                chunk.text += self.detokenizer.finish()
            if self.detokenizer.stopped is not None:
                chunk.finish_reason, chunk.stop_reason = "stop", self.detokenizer.stopped
        self.chunks.append(chunk)
        return chunk

    def end(self, reason: FinishReason) -> None:
        """Close the output of a request that was ended from outside."""
        text = self.detokenizer.finish() if self.detokenizer is not None else ""
        for branch in self.request.branches:
            self.chunks.append(
                CompletionChunk(
                    self.request.request_id, branch.index, text=text, finish_reason=reason
                )
            )

    def collect(self) -> RequestOutput:
        """Everything that was not taken chunk by chunk, as one output."""
        outputs = [CompletionOutput(branch.index) for branch in self.request.branches]
        while self.chunks:
            chunk = self.chunks.popleft()
            outputs[chunk.index].extend(chunk)
        asked = self.request.params.prompt_logprobs is not None
        return RequestOutput(
            self.request.request_id,
            self.prompt,
            list(self.request.prompt_token_ids),
            outputs,
            [None, *self.prompt_logprobs] if asked else None,
        )
