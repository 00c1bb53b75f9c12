"""A server under test: what it is called, and how a request is sent to it."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import httpx

from pageloom.bench.http.stream import Block, Received, StreamError
from pageloom.bench.serving.trace import TraceRequest
from pageloom.errors import PageloomError, shorten

KEY = "OPENAI_API_KEY"  # of the environment: what stands in a command line is seen by others

# A connection that the server may be about to close is not used again.
_LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)


@dataclass(frozen=True)
class Target:
    name: str
    url: str  # ends with /v1
    model: str = ""  # what the server calls it

    @classmethod
    def parse(cls, text: str) -> Target:
        """``"URL"`` or ``"NAME=URL"``, with ``/v1`` or without. Raises `PageloomError`."""
        match = re.fullmatch(r"(?:([\w. -]+)=)?(https?://([^/?#]+)[^?#]*)", text)
        if match is None:
            raise PageloomError(
                f"--url is {shorten(text)!r}, but must be a URL or NAME=URL, such as "
                "http://127.0.0.1:8000"
            )
        name, url, host = match.groups()
        return cls(name or host, f"{url.rstrip('/').removesuffix('/v1')}/v1")


def parse_targets(texts: Sequence[str]) -> list[Target]:
    """Raises `PageloomError` if two have the same name."""
    targets = [Target.parse(text) for text in texts]
    names = [target.name for target in targets]
    if twice := [name for name in names if names.count(name) > 1]:
        raise PageloomError(f"two --url are named {twice[0]!r}; give them names with NAME=URL")
    return targets


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are seconds from the start of the run."""

    arrival: float  # when the trace said it comes
    sent: float  # when the client came to send it
    finished: float  # when its stream had ended, or it had failed
    token_times: Sequence[float] = ()  # of the events that brought text
    prompt_tokens: int | None = None  # as the server counted them, if it did
    cached_tokens: int | None = None
    output_tokens: int = 0
    error: str = ""  # its kind; empty for a request that succeeded
    detail: str = ""  # what the error said

    @property
    def late(self) -> float:
        """How much later than the trace said the client came to send it, seconds."""
        return self.sent - self.arrival

    @property
    def ttft(self) -> float:
        """Time to first token, seconds from arrival: a late client counts as the server's queue
        would, or else a slow client would flatter."""
        return self.token_times[0] - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.token_times[-1] - self.token_times[0]) / (self.output_tokens - 1)

    @property
    def e2e(self) -> float:
        """End to end, seconds from arrival to the end of the stream."""
        return self.finished - self.arrival

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: seconds between events that brought text."""
        return [later - earlier for earlier, later in pairwise(self.token_times)]


class Connection:
    """Sends requests to one target. Use as an async context manager."""

    def __init__(self, target: Target, *, timeout: float, ignore_eos: bool) -> None:
        self.target = target
        self._ignore_eos = ignore_eos
        key = os.environ.get(KEY)
        self._client = httpx.AsyncClient(
            headers={"authorization": f"Bearer {key}"} if key else {},
            limits=_LIMITS,
            timeout=httpx.Timeout(timeout, pool=None),
            trust_env=False,  # a proxy would be measured too
            verify=target.url.startswith("https:"),  # reading the certificates takes a while
        )

    async def __aenter__(self) -> Connection:
        await self._client.__aenter__()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.__aexit__()

    async def model(self) -> str:
        """The first model that the server has. Raises `PageloomError`."""
        url = f"{self.target.url}/models"
        try:
            answer = await self._client.get(url)
            answer.raise_for_status()
            return str(answer.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise PageloomError(
                f"{url} does not say which models there are: {error or type(error).__name__}"
            ) from error

    async def send(self, request: TraceRequest, start: float = 0.0) -> Outcome:
        """Stream one request to its end. ``start`` is that of the run, by `time.monotonic`."""
        sent = time.monotonic() - start
        received, error, detail = Received(), "", ""
        try:
            received = Received.read(await self._blocks(request, start))
            error = self._wrong_length(request, received)
        except StreamError as failure:
            error, detail = failure.kind, str(failure)
        except httpx.HTTPError as failure:
            error, detail = _kind(failure), str(failure)
        counted = received.output_tokens
        return Outcome(
            arrival=request.arrival,
            sent=sent,
            finished=time.monotonic() - start,
            token_times=received.token_times,
            prompt_tokens=received.prompt_tokens,
            cached_tokens=received.cached_tokens,
            output_tokens=len(received.token_times) if counted is None else counted,
            error=error,
            detail=detail,
        )

    async def _blocks(self, request: TraceRequest, start: float) -> list[Block]:
        """What comes in is only noted, and read when all is there: work between two events would
        be seen as the server's."""
        url = f"{self.target.url}/completions"
        async with self._client.stream("POST", url, json=self._body(request)) as answer:
            if answer.status_code != 200:
                said = _message(await answer.aread())
                raise StreamError(f"status {answer.status_code}", said)
            return [Block(time.monotonic() - start, data) async for data in answer.aiter_bytes()]

    def _body(self, request: TraceRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.target.model,
            "prompt": request.prompt,
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._ignore_eos:
            body["ignore_eos"] = True
        if request.user:
            body["user"] = request.user
        if request.priority:
            body["priority"] = request.priority
        return body

    def _wrong_length(self, request: TraceRequest, received: Received) -> str:
        """A request that got fewer tokens than it was to is not the work to be measured."""
        counted = received.output_tokens
        if not received.token_times:
            return "no output"
        if self._ignore_eos and counted is not None and counted != request.output_tokens:
            return "output of another length"
        return ""


def _message(body: bytes) -> str:
    """What an error says, if its body is as the OpenAI API has it, or else all of it."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return shorten(body.decode(errors="replace"), 200)


def _kind(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
        return "no connection"
    if isinstance(error, httpx.TimeoutException):
        return "timeout"
    return "connection lost"
