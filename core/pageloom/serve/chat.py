"""``/v1/chat/completions``"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pageloom.engine.outputs import CompletionChunk, CompletionOutput
from pageloom.engine.prompts import NOT_VARIABLES
from pageloom.scheduling import SamplingParams
from pageloom.serve.calls import CallReader, Said, ToolUse, calls_for_template
from pageloom.serve.errors import APIError
from pageloom.serve.generation import Usage, sampling_params, unfit
from pageloom.serve.logprobs import chat_logprobs
from pageloom.serve.protocol import ChatCompletionRequest, ChatTemplateFields
from pageloom.serve.service import Service
from pageloom.serve.tools import Tool


@dataclass
class Chat:
    """One call."""

    service: Service
    request: ChatCompletionRequest
    prompt: list[int]
    params: SamplingParams
    tool_use: ToolUse | None = None

    @classmethod
    async def prepare(cls, service: Service, request: ChatCompletionRequest) -> Chat:
        """Raises `APIError`."""
        service.check_model(request.model)
        if request.top_logprobs is not None and not request.logprobs:
            raise APIError("top_logprobs needs logprobs to be true", param="top_logprobs")
        if request.best_of is not None and not request.use_beam_search:
            raise APIError("best_of is for completions, and for beam searches", param="best_of")
        params = sampling_params(
            request,
            max_tokens=request.max_completion_tokens or request.max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        )
        tool_use = ToolUse.of(service.tool_style, request)
        if tool_use is not None:
            params = tool_use.applied_to(params)
            await service.check_calls(tool_use)
        await service.check_structured(request)
        prompt = await render(service, request.messages, request, request.usable_tools())
        return cls(service, request, prompt, params, tool_use)

    async def whole(self) -> dict[str, Any]:
        """The answer without streaming."""
        usage = Usage.of(self.request, [self.prompt])
        outputs = [CompletionOutput(index) for index in range(self.request.n)]
        async with aclosing(self._chunks()) as chunks:
            async for _, chunk in chunks:
                usage.add(chunk)
                outputs[chunk.index].extend(chunk)
        return {
            **self.service.head("chat.completion", self.service.answer_id("chatcmpl")),
            "choices": [self._whole_choice(output) for output in outputs],
            "usage": usage.body(),
        }

    async def stream(self) -> AsyncIterator[dict[str, Any]]:
        """The bodies of the events. The first comes with the first token."""
        head = self.service.head("chat.completion.chunk", self.service.answer_id("chatcmpl"))
        usage = Usage.of(self.request, [self.prompt])
        readers: dict[int, CallReader | None] = {}
        async with aclosing(self._chunks()) as chunks:
            async for _, chunk in chunks:
                usage.add(chunk)
                begins = {} if chunk.index in readers else {"role": "assistant", "content": ""}
                reader = readers.setdefault(chunk.index, self._reader())
                delta = begins | said_in(chunk, reader).delta()
                choice = self._choice(chunk, {"delta": delta}, reader)
                if delta or choice["logprobs"] or choice["finish_reason"]:
                    yield {**head, "choices": [choice], **usage.in_chunk()}
        if usage.options.include_usage:
            yield {**head, "choices": [], "usage": usage.body()}

    def _chunks(self) -> AsyncGenerator[tuple[int, CompletionChunk]]:
        return self.service.generate([self.prompt], self.params, self.request).chunks()

    def _reader(self) -> CallReader | None:
        return None if self.tool_use is None else self.tool_use.reader(self.params)

    def _whole_choice(self, output: CompletionOutput) -> dict[str, Any]:
        reader = self._reader()
        return self._choice(output, {"message": said_in(output, reader).message()}, reader)

    def _choice(
        self,
        piece: CompletionChunk | CompletionOutput,
        said: dict[str, Any],
        reader: CallReader | None,
    ) -> dict[str, Any]:
        """All of a choice, or what a chunk adds to it."""
        logprobs = None
        if self.request.logprobs and piece.token_ids:
            logprobs = chat_logprobs(self.service.texts, piece.logprobs or [])
        called = reader is not None and reader.called and piece.finish_reason == "stop"
        return {
            "index": piece.index,
            **said,
            "logprobs": logprobs,
            "finish_reason": "tool_calls" if called else piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }


def said_in(piece: CompletionChunk | CompletionOutput, reader: CallReader | None) -> Said:
    """Text and calls. ``reader`` is that of the output, None if it can have no calls."""
    if reader is None:
        return Said(piece.text)
    stopped = piece.stop_reason is not None
    return reader.read(piece.text, ends=piece.finish_reason is not None, stopped=stopped)


async def render(
    service: Service,
    messages: list[dict[str, Any]],
    fields: ChatTemplateFields,
    tools: Sequence[Tool],
) -> list[int]:
    """Token ids of a conversation by the model's chat template. Raises `APIError`."""
    begins_answer = fields.add_generation_prompt
    if begins_answer is None:
        begins_answer = not fields.continue_final_message
    elif begins_answer and fields.continue_final_message:
        raise APIError(
            "the last message cannot be continued if a new one begins: leave out either "
            "add_generation_prompt or continue_final_message",
            param="continue_final_message",
        )
    variables = fields.chat_template_kwargs or {}
    if taken := sorted(NOT_VARIABLES & variables.keys()):
        raise APIError(
            f"{taken[0]} is not a variable that a chat template can be given",
            param="chat_template_kwargs",
        )
    try:
        return await asyncio.to_thread(
            service.prompts.render_chat,
            [as_plain(number, message) for number, message in enumerate(messages)],
            add_generation_prompt=begins_answer,
            continue_final_message=fields.continue_final_message,
            tools=[tool.for_template() for tool in tools],
            variables=variables,
        )
    except ValueError as error:
        raise unfit(error, "messages") from error


def as_plain(number: int, message: dict[str, Any]) -> dict[str, Any]:
    """The message as templates take it: without nulls, and parts of text as one text."""
    body = {name: value for name, value in message.items() if value is not None}
    if isinstance(parts := body.get("content"), list):
        for part in parts:
            if part.get("type") != "text" or not isinstance(part.get("text"), str):
                raise APIError(
                    f"messages[{number}] has a part of type {part.get('type')!r}; this model takes "
                    "text only",
                    param="messages",
                )
        body["content"] = "".join(part["text"] for part in parts)
    if "tool_calls" in body:
        body["tool_calls"] = calls_for_template(number, body)
        body.setdefault("content", "")
    return body
