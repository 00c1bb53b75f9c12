"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import aclosing, suppress
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from pageloom.serve.errors import APIError, internal_error
from pageloom.serve.generation import while_connected

log = logging.getLogger(__name__)

DONE = b"data: [DONE]\n\n"
HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}  # proxies must not gather it


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


async def events(bodies: AsyncIterator[dict[str, Any]]) -> AsyncIterator[bytes]:
    """Each body as an event, then the end; an error after the first is an event of its own."""
    async with aclosing(bodies):  # type: ignore[type-var]
        try:
            async for body in bodies:
                yield event(body)
        except APIError as error:
            yield event(error.body())
        except Exception:
            log.exception("a stream failed")
            yield event(internal_error().body())
        yield DONE


class EventStream(StreamingResponse):
    """Streams ``bodies``, and closes them at once when the client goes away."""

    def __init__(self, bodies: AsyncIterator[dict[str, Any]]) -> None:
        super().__init__(events(bodies), media_type="text/event-stream", headers=HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(APIError):  # the client has gone
            await while_connected(Request(scope, receive), self._write(send))

    async def _write(self, send: Send) -> None:
        async with aclosing(self.body_iterator):  # type: ignore[type-var]
            await self.stream_response(send)
