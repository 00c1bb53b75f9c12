"""A streamed completion, as it came in: what each event brought, and when."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any


class StreamError(Exception):
    """The stream says that it failed, or is none. ``kind`` is for counting."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(detail or kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes that arrived together, and when they did, in seconds."""

    time: float
    data: bytes


@dataclass(slots=True)
class Received:
    """What a stream came to."""

    token_times: list[float] = field(default_factory=list)  # of the events that brought text
    prompt_tokens: int | None = None  # these are None if the server did not say
    cached_tokens: int | None = None
    output_tokens: int | None = None

    @classmethod
    def read(cls, blocks: Iterable[Block]) -> Received:
        """Raises `StreamError` for an error in the stream, and for a stream that stops short."""
        received, first = cls(), None
        for time, data in _events(blocks):
            if data == b"[DONE]":
                if not received.token_times and first is not None:
                    received.token_times.append(first)  # tokens that are no text yet
                return received
            body = _parse(data)
            if choices := body.get("choices"):
                first = time if first is None else first
                if choices[0].get("text"):
                    received.token_times.append(time)
            if usage := body.get("usage"):
                received._count(usage)
        raise StreamError("stream without its end", "the stream ended without [DONE]")

    def _count(self, usage: dict[str, Any]) -> None:
        details = usage.get("prompt_tokens_details") or {}
        self.prompt_tokens = usage.get("prompt_tokens")
        self.cached_tokens = details.get("cached_tokens")
        self.output_tokens = usage.get("completion_tokens")


def _parse(data: bytes) -> dict[str, Any]:
    try:
        body = json.loads(data)
    except ValueError as error:
        raise StreamError("event that is not JSON", repr(data[:80])) from error
    if not isinstance(body, dict):
        raise StreamError("event that is not JSON", repr(data[:80]))
    if failure := body.get("error"):
        message = failure.get("message") if isinstance(failure, dict) else failure
        raise StreamError("error in the stream", str(message))
    return body


def _events(blocks: Iterable[Block]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event; it came when its line was complete."""
    rest = b""
    for block in blocks:
        *lines, rest = (rest + block.data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield block.time, line.removeprefix(b"data:").strip()
