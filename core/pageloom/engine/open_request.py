"""A request as its client sees it: text going out, chunk by chunk."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

from pageloom.engine.detokenizer import Detokenizer
from pageloom.engine.outputs import CompletionChunk, CompletionOutput, RequestOutput
from pageloom.runner.runner import ChunkResult
from pageloom.scheduling import FinishReason, Request
from pageloom.scheduling.logprobs import TokenLogprobs

log = logging.getLogger(__name__)


class OpenRequest:
    """Turns a request's sampled tokens into chunks.

    Chunks go to ``deliver`` if there is one, and otherwise gather in `chunks`.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        detokenizer: Detokenizer | None,
        deliver: Callable[[CompletionChunk], None] | None = None,
    ) -> None:
        self.request = request
        self.prompt = prompt
        self.chunks: deque[CompletionChunk] = deque()
        self._detokenizer = detokenizer
        self.deliver = deliver or self.chunks.append
        self._prompt_logprobs: list[TokenLogprobs] = []  # not handed on yet

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def receive(self, result: ChunkResult) -> CompletionChunk | None:
        """Take in what a step computed for this request; the tokens are on its branch already.

        Returns what is to be delivered if there is a token, with a finish reason if it is the last.
        """
        self._prompt_logprobs += result.prompt_logprobs
        if result.token_id is None:
            return None
        params, branch = self.request.params, result.chunk.branch
        chunk = CompletionChunk(self.request.request_id, branch.index, token_ids=[result.token_id])
        if result.logprobs is not None:
            chunk.logprobs = [result.logprobs]
        if params.prompt_logprobs is not None and len(branch.output_token_ids) == 1:
            chunk.prompt_logprobs = [None, *self._prompt_logprobs]
            self._prompt_logprobs = []
        chunk.finish_reason = self.request.stop_reason_of(branch)
        stopped_by_token = chunk.finish_reason == "stop"
        if stopped_by_token and result.token_id in params.stop_token_ids:
            chunk.stop_reason = result.token_id
        if self._detokenizer is not None:
            if not stopped_by_token or params.include_stop_str_in_output:
                chunk.text = self._detokenizer.append(result.token_id)
            if chunk.finish_reason is not None and self._detokenizer.stopped is None:
                chunk.text += self._detokenizer.finish()
            if self._detokenizer.stopped is not None:
                chunk.finish_reason, chunk.stop_reason = "stop", self._detokenizer.stopped
        return chunk

    def end(self, reason: FinishReason) -> None:
        """Deliver the last chunk of a request that was ended from outside. Never raises."""
        for branch in self.request.branches:
            chunk = CompletionChunk(self.request.request_id, branch.index, finish_reason=reason)
            try:
                if self._detokenizer is not None:
                    chunk.text = self._detokenizer.finish()
            except Exception:
                log.exception("the last text of request %s is lost", self.request.request_id)
            self.deliver(chunk)

    def collect(self) -> RequestOutput:
        """Everything that was not taken chunk by chunk, as one output."""
        outputs = [CompletionOutput(branch.index) for branch in self.request.branches]
        whole = RequestOutput(
            self.request.request_id, self.prompt, list(self.request.prompt_token_ids), outputs
        )
        while self.chunks:
            chunk = self.chunks.popleft()
            outputs[chunk.index].extend(chunk)
            if chunk.prompt_logprobs is not None:
                whole.prompt_logprobs = chunk.prompt_logprobs
        return whole
