"""What every HTTP request passes through before any path is looked at."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pageloom.errors import shorten
from pageloom.serve import http_metrics
from pageloom.serve.auth import Keys
from pageloom.serve.errors import APIError, internal_error, overloaded, wrong_key
from pageloom.serve.request_id import HEADER, choose, request_id

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health"})
"""What needs no key. Everything else does, whether it exists or not."""


class Gate:
    """Gives each request an id, asks for a key, bounds how many are served at once, and answers
    what failed without saying where."""

    def __init__(self, app: ASGIApp, keys: Keys, max_open: int | None) -> None:
        self._app = app
        self._keys = keys
        self._max_open = max_open
        self._num_open = 0  # requests with a body, whose number is bounded

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._other(scope, receive, send)
            return
        headers = dict(scope["headers"])
        name = choose(headers.get(HEADER))
        answer = _Answer(send, name)
        with _named(name):
            started = time.monotonic()
            try:
                if refusal := self._refusal(scope, headers):
                    await error_response(refusal)(scope, receive, answer.send)
                else:
                    await self._serve(scope, receive, answer)
            finally:
                seconds, path = time.monotonic() - started, shorten(scope["path"], 200)
                http_metrics.count(scope, answer.status, seconds)
                log.info(
                    "%s %s: %s after %.3f s (request %s)",
                    scope["method"],
                    path,
                    answer.status or "no answer",
                    seconds,
                    name,
                    extra={
                        "fields": {
                            "method": scope["method"],
                            "path": path,
                            "status": answer.status,
                            "seconds": round(seconds, 3),
                        }
                    },
                )

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> APIError | None:
        if scope["path"] not in OPEN_PATHS and not self._keys.admit(headers.get(b"authorization")):
            return wrong_key()
        full = self._max_open is not None and self._num_open >= self._max_open
        return overloaded(self._num_open) if full and _has_body(scope) else None

    async def _serve(self, scope: Scope, receive: Receive, answer: _Answer) -> None:
        self._num_open += _has_body(scope)
        try:
            await self._app(scope, receive, answer.send)
        except Exception:
            log.exception("%s %s failed (request %s)", scope["method"], scope["path"], answer.name)
            if not answer.status:
                await error_response(internal_error())(scope, receive, answer.send)
            elif not answer.complete:
                raise  # nothing is left but to cut the connection
        finally:
            self._num_open -= _has_body(scope)

    async def _other(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        else:  # there is no websocket here
            await send({"type": "websocket.close", "code": 1008})


class _Answer:
    """The way back to the client, which the request's id travels too."""

    def __init__(self, send: Send, name: str) -> None:
        self.name = name
        self.status = 0  # none yet
        self.complete = False
        self._send = send

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            message["headers"] = [*message.get("headers", ()), (HEADER, self.name.encode())]
        else:
            self.complete = not message.get("more_body", False)
        await self._send(message)


def error_response(error: APIError) -> JSONResponse:
    return JSONResponse(error.body(), error.status, headers=error.headers())


def _has_body(scope: Scope) -> bool:
    return scope["method"] not in ("GET", "HEAD", "OPTIONS")


@contextmanager
def _named(name: str) -> Iterator[None]:
    token = request_id.set(name)
    try:
        yield
    finally:
        request_id.reset(token)
