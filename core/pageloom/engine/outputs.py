"""What the engine returns."""

from __future__ import annotations

from dataclasses import dataclass, field

from pageloom.scheduling import FinishReason
from pageloom.scheduling.logprobs import TokenLogprobs


@dataclass(slots=True)
class CompletionChunk:
    """What one step added to one branch of a request. ``text`` and ``token_ids`` are new.

    Text may lag behind tokens: it is held back while it could be part of a character or of a
    stop string. The last chunk of a branch has a `finish_reason`.
    """

    request_id: str
    index: int  # of the branch
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None  # one per token id, if asked for
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # with the first, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the token id or string that stopped it; None for EOS


@dataclass(slots=True)
class CompletionOutput:
    """All of one branch."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    def extend(self, chunk: CompletionChunk) -> None:
        self.text += chunk.text
        self.token_ids += chunk.token_ids
        if chunk.logprobs is not None:
            self.logprobs = (self.logprobs or []) + chunk.logprobs
        self.finish_reason, self.stop_reason = chunk.finish_reason, chunk.stop_reason


@dataclass(slots=True)
class RequestOutput:
    """A whole request."""

    request_id: str
    prompt: str | None  # None if it was given as token ids
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # the first token has none
