"""A request as its client sees it: text going out, chunk by chunk."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from pageloom.engine.detokenizer import Detokenizer
from pageloom.engine.outputs import CompletionChunk, CompletionOutput, RequestOutput
from pageloom.engine.planned import Draw
from pageloom.scheduling import Branch, FinishReason, Request
from pageloom.scheduling.beams import Hypothesis
from pageloom.scheduling.logprobs import TokenLogprobs

log = logging.getLogger(__name__)


class OpenRequest:
    """Turns a request's tokens into chunks, of each of its ``n`` outputs by itself.

    Chunks go to ``deliver`` if there is one, and otherwise gather in `chunks`.
    """

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        detokenizers: Sequence[Detokenizer],
        deliver: Callable[[CompletionChunk], None] | None = None,
    ) -> None:
        """``detokenizers`` are one per output, or none if there is no text, only ids."""
        self.request = request
        self.prompt = prompt
        self.chunks: deque[CompletionChunk] = deque()
        self._detokenizers = dict(enumerate(detokenizers))  # of outputs that have not ended
        self._unfinished = dict.fromkeys(range(request.params.n))
        self.deliver: Callable[[CompletionChunk], None] = deliver or self.chunks.append
        self._prompt_logprobs: list[TokenLogprobs | None] = [None]
        self._began = False

    @property
    def finished(self) -> bool:
        return self.request.finish_reason is not None

    def send(self, chunk: CompletionChunk) -> bool:
        """Deliver a chunk; False if whoever takes them raised, and so gets no more."""
        if not self._began:
            chunk.cached_tokens, self._began = self.request.cached_tokens, True
        try:
            self.deliver(chunk)
        except Exception:
            log.exception("request %s is aborted: its chunks are not taken", chunk.request_id)
            self.deliver = _discard
            return False
        return True

    def score_prompt(self, scores: list[TokenLogprobs]) -> None:
        """Take in log-probabilities of the next tokens of the prompt."""
        self._prompt_logprobs += scores

    def receive(self, branch: Branch, draw: Draw) -> CompletionChunk:
        """The chunk of a token, which is on its branch already; with a finish reason if it is the
        branch's last."""
        params, index = self.request.params, branch.index
        chunk = CompletionChunk(self.request.request_id, index, token_ids=[draw.token_id])
        if draw.logprobs is not None:
            chunk.logprobs = [draw.logprobs]
        if len(branch.output_token_ids) == 1:
            chunk.prompt_logprobs = self._take_prompt_logprobs()
        chunk.finish_reason = self.request.stop_reason_of(branch)
        ends = draw.token_id in self.request.stop_token_ids  # a guide may have ended it otherwise
        stopped_by_token = chunk.finish_reason == "stop" and ends
        if stopped_by_token and draw.token_id in params.stop_token_ids:
            chunk.stop_reason = draw.token_id
        if detokenizer := self._detokenizers.get(index):
            if not stopped_by_token or params.include_stop_str_in_output:
                chunk.text = detokenizer.append(draw.token_id)
            if chunk.finish_reason is not None and detokenizer.stopped is None:
                chunk.text += detokenizer.finish()
            if detokenizer.stopped is not None:
                chunk.finish_reason, chunk.stop_reason = "stop", detokenizer.stopped
        if chunk.finish_reason is not None:
            self._forget(index)
        return chunk

    def receive_beams(self) -> Iterator[CompletionChunk]:
        """The outputs of a beam search that is done, whole, the best first."""
        assert self.request.beams is not None
        for index, output in enumerate(self.request.beams.results()):
            yield CompletionChunk(
                self.request.request_id,
                index,
                text=self._text_of(index, output),
                token_ids=output.token_ids,
                prompt_logprobs=self._take_prompt_logprobs(),
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                score=output.score,
            )
            self._forget(index)

    def end(self, reason: FinishReason) -> None:
        """Deliver the last chunks of a request that was ended from outside. Never raises."""
        for index in list(self._unfinished):
            chunk = CompletionChunk(self.request.request_id, index, finish_reason=reason)
            try:
                if index in self._detokenizers:
                    chunk.text = self._detokenizers[index].finish()
            except Exception:
                log.exception("the last text of request %s is lost", self.request.request_id)
            self._forget(index)
            self.send(chunk)

    def collect(self) -> RequestOutput:
        """Everything that was not taken chunk by chunk, as one output."""
        outputs = [CompletionOutput(index) for index in range(self.request.params.n)]
        whole = RequestOutput(
            self.request.request_id, self.prompt, list(self.request.prompt_token_ids), outputs
        )
        while self.chunks:
            chunk = self.chunks.popleft()
            outputs[chunk.index].extend(chunk)
            whole.cached_tokens += chunk.cached_tokens
            if chunk.prompt_logprobs is not None:
                whole.prompt_logprobs = chunk.prompt_logprobs
        return whole

    def _forget(self, index: int) -> None:
        self._unfinished.pop(index, None)
        self._detokenizers.pop(index, None)

    def _text_of(self, index: int, output: Hypothesis) -> str:
        detokenizer, token_ids = self._detokenizers.get(index), output.token_ids
        if detokenizer is None:
            return ""
        if output.finish_reason == "stop" and not self.request.params.include_stop_str_in_output:
            token_ids = token_ids[:-1]
        return "".join(map(detokenizer.append, token_ids)) + detokenizer.finish()

    def _take_prompt_logprobs(self) -> list[TokenLogprobs | None] | None:
        """Once, with the first output; then None."""
        if self.request.params.prompt_logprobs is None or not self._prompt_logprobs:
            return None
        taken, self._prompt_logprobs = self._prompt_logprobs, []
        return taken


def _discard(chunk: CompletionChunk) -> None: ...
