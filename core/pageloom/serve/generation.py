"""From a client's fields to requests of the engine, and to what comes back of them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

from starlette.requests import Request

from pageloom.engine.outputs import CompletionChunk
from pageloom.scheduling import SamplingParams
from pageloom.scheduling.errors import field_at_fault
from pageloom.scheduling.params import MAX_BEAM_WIDTH
from pageloom.serve.client import EngineDiedError, RequestRefusedError
from pageloom.serve.errors import APIError, engine_died, step_failed
from pageloom.serve.protocol import GenerationFields, StreamOptions
from pageloom.serve.structured import refused

T = TypeVar("T")

# Fields that have a namesake in `SamplingParams`, whose default stands where the client sent none.
SAME_NAME = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "stop",
    "stop_token_ids",
    "min_tokens",
    "ignore_eos",
    "skip_special_tokens",
    "include_stop_str_in_output",
    "length_penalty",
    "early_stopping",
)


def sampling_params(
    fields: GenerationFields,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Raises `APIError` that says which field cannot be."""
    if fields.stream_options is not None and not fields.stream:
        raise APIError("stream_options needs stream to be true", param="stream_options")
    values: dict[str, Any] = {
        name: value for name in SAME_NAME if (value := getattr(fields, name)) is not None
    }
    values |= {
        "n": fields.n,
        "max_tokens": max_tokens,
        "logprobs": logprobs,
        "prompt_logprobs": prompt_logprobs,
    }
    structured = fields.structured()
    if structured is not None:
        values["structured"] = structured[1]
    try:
        return SamplingParams(**values | _tries(fields, logprobs))
    except ValueError as error:
        if structured is not None and field_at_fault(error) == "structured":
            raise refused(structured[0], error) from error
        raise invalid(error) from error


def _tries(fields: GenerationFields, logprobs: int | None) -> dict[str, Any]:
    """How many outputs are tried, where that is more than are returned."""
    tried = fields.n if fields.best_of is None else fields.best_of
    if tried < fields.n:
        raise APIError(f"best_of is {tried}, less than n, {fields.n}", param="best_of")
    if fields.use_beam_search:
        if not 2 <= tried <= MAX_BEAM_WIDTH:
            raise APIError(
                f"a beam search has as many beams as n or best_of say, which is {tried}; it must "
                f"be from 2 to {MAX_BEAM_WIDTH}",
                param="best_of",
            )
        return {"beam_width": tried}
    if tried == fields.n:
        return {}
    if fields.stream:
        raise APIError(
            "best_of above n cannot be streamed: which outputs are best is known at the end",
            param="best_of",
        )
    return {"n": tried, "logprobs": logprobs or 0}  # by which the outputs are ranked


def invalid(error: ValueError) -> APIError:
    """What the checks of `SamplingParams` say, in the words of the request."""
    param = _in_its_words(field_at_fault(error) or "") or None
    return APIError(_in_its_words(str(error)), param=param)


@dataclass
class Usage:
    """Tokens of a whole request: of all its prompts and of all outputs that were tried."""

    prompt_tokens: int
    options: StreamOptions
    completion_tokens: int = 0
    cached_tokens: int = 0

    @classmethod
    def of(cls, fields: GenerationFields, prompts: Sequence[Sequence[int]]) -> Usage:
        return cls(sum(map(len, prompts)), fields.stream_options or StreamOptions())

    def add(self, chunk: CompletionChunk) -> None:
        self.completion_tokens += len(chunk.token_ids)
        self.cached_tokens += chunk.cached_tokens

    def body(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }

    def in_chunk(self) -> dict[str, Any]:
        """What a chunk of a stream says: null if only the last one counts, as OpenAI's do."""
        if self.options.continuous_usage_stats:
            return {"usage": self.body()}
        return {"usage": None} if self.options.include_usage else {}


@dataclass
class Generation:
    """The chunks of several prompts, merged as they come, each with the number of its prompt."""

    streams: Sequence[AsyncIterator[CompletionChunk]]
    _queue: asyncio.Queue[tuple[int, CompletionChunk | Exception | None]] = field(
        default_factory=asyncio.Queue
    )

    async def chunks(self) -> AsyncGenerator[tuple[int, CompletionChunk]]:
        """Raises `APIError` for whatever ends the request early. Closing it aborts all."""
        tasks = [asyncio.create_task(self._pump(i, s)) for i, s in enumerate(self.streams)]
        unfinished = len(tasks)
        try:
            while unfinished:
                number, item = await self._queue.get()
                if item is None:
                    unfinished -= 1
                elif isinstance(item, Exception):
                    raise _as_api_error(item) from item
                elif item.finish_reason in ("error", "abort"):  # nobody here has aborted it
                    raise step_failed()
                else:
                    yield number, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(self, number: int, stream: AsyncIterator[CompletionChunk]) -> None:
        try:
            async with aclosing(stream):  # type: ignore[type-var]
                async for chunk in stream:
                    self._queue.put_nowait((number, chunk))
        except Exception as error:
            self._queue.put_nowait((number, error))
        else:
            self._queue.put_nowait((number, None))


def _as_api_error(error: Exception) -> Exception:
    if isinstance(error, RequestRefusedError):
        return unfit(error)
    return engine_died() if isinstance(error, EngineDiedError) else error


def unfit(error: ValueError, param: str = "prompt") -> APIError:
    """What is wrong with a prompt, or with what only the engine could find fault with."""
    # The engine's name of the request is none that the client knows.
    message = re.sub(r"^request \S+", "the request", _in_its_words(str(error)))
    code = "context_length_exceeded" if "max_model_len" in message else None
    return APIError(message, param=_in_its_words(field_at_fault(error) or param), code=code)


def _in_its_words(text: str) -> str:
    return text.replace("beam_width", "use_beam_search")


async def peek(stream: AsyncIterator[T]) -> AsyncIterator[T]:
    """The same stream, whose first item has come: what fails before it is raised here."""
    try:
        first = [await anext(stream)]
    except StopAsyncIteration:
        first = []

    async def whole() -> AsyncIterator[T]:
        async with aclosing(stream):  # type: ignore[type-var]
            for item in first:
                yield item
            async for item in stream:
                yield item

    return whole()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """What ``work`` returns, which is cancelled as soon as the client has gone."""
    task = asyncio.ensure_future(work)
    watch = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise APIError("the client has gone", 499)
        return task.result()
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
