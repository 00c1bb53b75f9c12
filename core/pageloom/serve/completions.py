"""``/v1/completions``"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from pageloom.engine.outputs import CompletionChunk, CompletionOutput
from pageloom.scheduling import SamplingParams
from pageloom.scheduling.logprobs import TokenLogprobs
from pageloom.serve.errors import APIError
from pageloom.serve.generation import Usage, sampling_params
from pageloom.serve.logprobs import CompletionLogprobs, EchoedPrompt
from pageloom.serve.protocol import MAX_PROMPTS, CompletionRequest
from pageloom.serve.service import Service


@dataclass
class Completion:
    """One call: its prompts, and how what comes back becomes choices."""

    service: Service
    request: CompletionRequest
    prompts: list[list[int]]
    echoed: list[EchoedPrompt]  # one per prompt, or none
    params: SamplingParams
    _prompt_scores: dict[int, list[TokenLogprobs | None]] = field(default_factory=dict)
    _begun: set[int] = field(default_factory=set)  # indices of choices
    _lists: dict[int, CompletionLogprobs] = field(default_factory=dict)  # by index of the choice

    @classmethod
    async def prepare(cls, service: Service, request: CompletionRequest) -> Completion:
        """Raises `APIError`."""
        service.check_model(request.model)
        sent = request.prompts()
        if not 1 <= len(sent) <= MAX_PROMPTS:
            raise APIError(
                f"there are {len(sent)} prompts; send 1 to {MAX_PROMPTS}", param="prompt"
            )
        _check_nothing_to_generate(request)
        params = sampling_params(
            request,
            max_tokens=max(request.max_tokens, 1),  # the engine computes one at least
            logprobs=request.logprobs,
            prompt_logprobs=request.logprobs if request.echo else None,
        )
        await service.check_structured(request)
        prompts = await service.encode(sent, add_special_tokens=request.add_special_tokens)
        for number, token_ids in enumerate(prompts):
            if not token_ids:
                raise APIError(f"prompt {number} is empty; send at least a token", param="prompt")
        echoed = []
        if request.echo:
            echoed = await asyncio.to_thread(_echo, service, sent, prompts)
        return cls(service, request, prompts, echoed, params)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        usage, tried = self._usage(), range(self.params.n)
        outputs = [[CompletionOutput(index) for index in tried] for _ in self.prompts]
        async with aclosing(self._chunks()) as chunks:
            async for number, chunk in chunks:
                usage.add(chunk)
                outputs[number][chunk.index].extend(chunk)
        return {
            **self.service.head("text_completion", self.service.answer_id("cmpl")),
            "choices": [
                self._choice(number, output)
                for number, of_prompt in enumerate(outputs)
                for output in likeliest(of_prompt, self.request.n)
            ],
            "usage": usage.body(),
        }

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """The bodies of the events. The first comes with the first token."""
        head = self.service.head("text_completion", self.service.answer_id("cmpl"))
        usage = self._usage()
        async with aclosing(self._chunks()) as chunks:
            async for number, chunk in chunks:
                usage.add(chunk)
                choice = self._choice(number, chunk)
                if choice["text"] or choice["logprobs"] or choice["finish_reason"]:
                    yield {**head, "choices": [choice], **usage.in_chunk()}
        if usage.options.include_usage:
            yield {**head, "choices": [], "usage": usage.body()}

    async def _chunks(self) -> AsyncGenerator[tuple[int, CompletionChunk]]:
        generation = self.service.generate(self.prompts, self.params, self.request)
        async with aclosing(generation.chunks()) as chunks:
            async for number, chunk in chunks:
                if chunk.prompt_logprobs is not None:  # with the first chunk of a prompt only
                    self._prompt_scores[number] = chunk.prompt_logprobs
                yield number, chunk if self.request.max_tokens else without_output(chunk)

    def _usage(self) -> Usage:
        return Usage.of(self.request, self.prompts)

    def _choice(self, number: int, piece: CompletionChunk | CompletionOutput) -> dict[str, Any]:
        """All of a choice of the prompt ``number``, or what a chunk adds to it."""
        index = number * self.request.n + piece.index
        begins = self.echoed[number] if self.echoed and index not in self._begun else None
        self._begun.add(index)
        return {
            "index": index,
            "text": piece.text if begins is None else begins.text + piece.text,
            "logprobs": self._logprobs(number, index, begins, piece),
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    def _logprobs(
        self,
        number: int,
        index: int,
        begins: EchoedPrompt | None,
        piece: CompletionChunk | CompletionOutput,
    ) -> dict[str, list[Any]] | None:
        if self.request.logprobs is None:
            return None
        if index not in self._lists:
            self._lists[index] = CompletionLogprobs(
                self.service.texts, self.prompts[number], self.params.skip_special_tokens
            )
        lists = self._lists[index]
        if begins is not None:
            lists.add_prompt(begins, self._prompt_scores[number])
        lists.add(piece.token_ids, piece.logprobs or [])
        return lists.take()


def likeliest(outputs: list[CompletionOutput], count: int) -> list[CompletionOutput]:
    """The best ``count`` by log-probability per token, numbered anew; all as they are, if there
    are no more."""
    if len(outputs) == count:
        return outputs

    def mean(output: CompletionOutput) -> float:
        scores = output.logprobs or []
        return sum(score.logprob for score in scores) / max(len(scores), 1)

    best = sorted(outputs, key=mean, reverse=True)[:count]
    return [replace(output, index=index) for index, output in enumerate(best)]


def without_output(chunk: CompletionChunk) -> CompletionChunk:
    """For ``max_tokens`` 0: the engine has computed a token nevertheless."""
    return replace(
        chunk, text="", token_ids=[], logprobs=None, finish_reason="length", stop_reason=None
    )


def _check_nothing_to_generate(request: CompletionRequest) -> None:
    if request.max_tokens:
        return
    if not request.echo:
        raise APIError(
            "max_tokens is 0, which asks for nothing; with echo it scores the prompt",
            param="max_tokens",
        )
    if request.min_tokens:
        raise APIError(
            f"min_tokens is {request.min_tokens}, more than max_tokens, 0", param="min_tokens"
        )


def _echo(
    service: Service, sent: Sequence[str | list[int]], prompts: Sequence[list[int]]
) -> list[EchoedPrompt]:
    tokenizer = service.prompts.tokenizer
    return [
        EchoedPrompt.of_text(tokenizer, prompt, token_ids)
        if isinstance(prompt, str) and tokenizer is not None
        else EchoedPrompt.of_tokens(tokenizer, token_ids)
        for prompt, token_ids in zip(sent, prompts, strict=True)
    ]
