"""What the engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageloom.scheduling import FinishReason
from pageloom.scheduling.logprobs import TokenLogprobs


@dataclass(slots=True)
class CompletionChunk:
    """What one step added to one output of a request. ``text`` and ``token_ids`` are new.

    Text may lag behind tokens: it is held back while it could be part of a character or of a
    stop string. The last chunk of an output has a `finish_reason`. An output of a beam search
    comes as a whole, in one chunk.
    """

    request_id: str
    index: int  # of the output, from 0 to n - 1
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one per token id, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first, if asked for
    cached_tokens: int = 0  # of the prompt, from the prefix cache; with the request's first chunk
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it; None for EOS
    score: float | None = None  # of a beam, see `pageloom.scheduling.beams.Hypothesis`


@dataclass(slots=True)
class CompletionOutput:
    """All of one output."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    score: float | None = None

    def extend(self, chunk: CompletionChunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason
        self.score = chunk.score


@dataclass(slots=True)
class RequestOutput:
    """A whole request."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]  # n of them; of beams the best first
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none
    cached_tokens: int = 0  # of the prompt, from the prefix cache
