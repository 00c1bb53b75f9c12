"""The server's end of the engine process: starts it, feeds it, and knows when it is gone."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from pageloom.contract import EngineInfo
from pageloom.contract.framing import Unpacker
from pageloom.engine.outputs import CompletionChunk
from pageloom.scheduling import RequestError, SamplingParams
from pageloom.serve import leave, logs
from pageloom.serve.request_id import request_id
from pageloom.serve.silence import wait_for_silence
from pageloom.serve.wire import (
    MAX_MESSAGE,
    Abort,
    Failed,
    FromEngine,
    Inspect,
    Inspection,
    Ping,
    Ready,
    Refused,
    Steps,
    Submit,
    ToEngine,
    pack,
)

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
PATIENCE = 10.0  # seconds from closing the connection to killing the process
LAST_BREATH = 1.0  # the same, for a process that has closed it itself


class EngineDiedError(RuntimeError):
    """The engine process ended while a request was open, or is not there, or cannot start."""


class RequestRefusedError(RequestError):
    """The engine did not take a request; the message says what its client can change."""


class EngineClient:
    """Requests to an engine that runs in a process of its own.

    `start` once; everything else from the same event loop. `died` is set when the process has
    ended without being told to; every open stream has raised `EngineDiedError` by then.
    """

    def __init__(
        self,
        config: str,
        overrides: Sequence[str] = (),
        log_level: str = "",
        timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """A process that answers nothing for ``timeout`` seconds, which is longer than any step
        takes, is ended; None waits for ever. It has the variables of ``environment`` beside those
        of this process."""
        self._config, self._overrides = config, list(overrides)
        self._log_level = log_level or logging.getLevelName(log.getEffectiveLevel())
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._streams: dict[str, asyncio.Queue[CompletionChunk | Exception]] = {}
        self._waiting: set[str] = set()
        self._inspections: list[asyncio.Future[Inspection]] = []
        self._ids = itertools.count()
        self._stopping = False
        self._timeout = timeout
        self._environment = environment or {}
        self._heard = 0  # messages
        self._ready: Ready | None = None
        self.died = asyncio.Event()

    @property
    def info(self) -> EngineInfo:
        return self._hello.info

    @property
    def vocab_size(self) -> int:
        return self._hello.vocab_size

    @property
    def _hello(self) -> Ready:
        if self._ready is None:
            raise EngineDiedError("the engine is not ready")
        return self._ready

    @property
    def is_alive(self) -> bool:
        return self._writer is not None

    @property
    def num_open(self) -> int:
        """Requests that have not ended yet."""
        return len(self._streams)

    @property
    def num_waiting(self) -> int:
        """Requests that have had no chunk yet."""
        return len(self._waiting)

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    async def start(self) -> None:
        """Returns when the model is loaded. Raises `EngineDiedError`, which says why, if it cannot
        be; and then, as when this is cancelled, no process is left."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "pageloom.serve.worker"),
                *("--socket", str(theirs.fileno()), "--log-level", self._log_level),
                *("--log-format", logs.configured()),
                *("--", self._config, *self._overrides),
                pass_fds=[theirs.fileno()],
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, **self._environment},
                start_new_session=True,  # Ctrl-C is for the server, which drains first
            )
        reader, writer = await asyncio.open_connection(sock=ours)
        try:
            messages = _messages(reader)
            first = await anext(messages, None)
            if not isinstance(first, Ready):
                raise await self._not_ready(first)
        except BaseException:
            self.kill()
            writer.close()
            raise
        self._ready, self._writer = first, writer
        self.died.clear()
        self._reading = asyncio.create_task(self._read(messages))

    async def _not_ready(self, first: FromEngine | None) -> EngineDiedError:
        if isinstance(first, Failed):
            return EngineDiedError(first.reason)
        assert self._process is not None
        how = _how_it_ended(await self._process.wait())
        return EngineDiedError(f"the engine process {how} before its model was loaded")

    async def generate(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        user: str = "",
        cache_salt: str = "",
    ) -> AsyncIterator[CompletionChunk]:
        """Chunks as they come, up to the last of each output. Closing the iterator aborts.

        Raises `RequestRefusedError` and `EngineDiedError`.
        """
        name = f"{request_id.get() or 'request'}-{next(self._ids)}"
        queue: asyncio.Queue[CompletionChunk | Exception] = asyncio.Queue()
        self._send(Submit(name, list(prompt), to_fields(params), priority, user, cache_salt))
        self._streams[name] = queue
        self._waiting.add(name)
        unfinished = params.n
        try:
            while unfinished:
                chunk = await queue.get()
                if isinstance(chunk, Exception):
                    unfinished = 0
                    raise chunk
                unfinished -= chunk.finish_reason is not None
                yield chunk
        finally:
            self._streams.pop(name, None)
            self._waiting.discard(name)
            if unfinished and self.is_alive:
                self._send(Abort(name))

    async def inspect(self) -> Inspection:
        """Raises `EngineDiedError`."""
        answer: asyncio.Future[Inspection] = asyncio.get_running_loop().create_future()
        self._send(Inspect())
        self._inspections.append(answer)
        return await answer

    async def stop(self) -> None:
        """End the process, and with it what is open. Safe to call twice."""
        self._stopping = True
        if self._process is None:
            return
        if self._writer is not None:
            self._writer.close()
        await self._end_of(self._process, PATIENCE)
        if self._reading is not None:
            await self._reading

    def kill(self) -> None:
        """End the process at once."""
        if self._process is not None:
            leave.kill(self._process)

    async def _read(self, messages: AsyncIterator[FromEngine]) -> None:
        listening = asyncio.create_task(self._listen())
        try:
            async for message in messages:
                self._heard += 1
                self._receive(message)
        except Exception:
            log.exception("the engine process sent what cannot be read")
            self.kill()
        listening.cancel()
        self._end()
        if not self._stopping:
            await self._bury()
            self.died.set()

    async def _listen(self) -> None:
        """Notice a process that hangs."""
        if self._timeout is None:
            return
        with suppress(EngineDiedError):  # by now it is known otherwise
            await wait_for_silence(lambda: self._send(Ping()), lambda: self._heard, self._timeout)
            self._cut_off()

    def _cut_off(self) -> None:
        """End it; all goes on as if it had died."""
        log.error(
            "the engine process has answered nothing for %g seconds "
            "(server.engine_timeout_seconds)",
            self._timeout,
        )
        self.kill()
        if self._writer is not None:  # a driver may keep it from ending, but not us from going on
            self._writer.transport.abort()

    def _receive(self, message: FromEngine) -> None:
        if isinstance(message, Steps):
            for chunk in message.chunks:
                if queue := self._streams.get(chunk.request_id):
                    self._waiting.discard(chunk.request_id)
                    queue.put_nowait(chunk)
        elif isinstance(message, Refused):
            if queue := self._streams.get(message.id):
                queue.put_nowait(RequestRefusedError(message.reason, message.field))
        elif isinstance(message, Inspection) and self._inspections:
            answer = self._inspections.pop(0)
            if not answer.done():
                answer.set_result(message)

    def _end(self) -> None:
        """The connection is closed: whoever waits is told at once."""
        if self._writer is not None:
            self._writer.close()
        self._writer = None
        failure = EngineDiedError("the engine process ended")
        for queue in self._streams.values():
            queue.put_nowait(failure)
        for answer in self._inspections:
            if not answer.done():
                answer.set_exception(failure)
        self._inspections.clear()

    async def _bury(self) -> None:
        """See to it that the process has ended, so that another has its place, and say how."""
        assert self._process is not None
        if (code := await self._end_of(self._process, LAST_BREATH)) is not None:
            log.error("the engine process (pid %s) %s", self.pid, _how_it_ended(code))

    async def _end_of(self, process: asyncio.subprocess.Process, patience: float) -> int | None:
        """The exit code, after ``patience`` seconds by force; None if that does not help."""
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), patience)
        log.warning("the engine process does not end and is killed")
        self.kill()
        with suppress(TimeoutError):
            return await asyncio.wait_for(process.wait(), PATIENCE)
        log.error("the engine process (pid %s) is still there, though it was killed", process.pid)
        return None

    def _send(self, message: ToEngine) -> None:
        if self._writer is None or self._writer.is_closing():
            raise EngineDiedError("the engine process is not running")
        self._writer.write(pack(message))


def to_fields(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from their defaults, as plain values."""
    found = {}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if isinstance(value, Mapping):
            value = dict(value)
        if value != field.default:
            found[field.name] = value
    return found


def _how_it_ended(code: int) -> str:
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"


async def _messages(reader: asyncio.StreamReader) -> AsyncIterator[FromEngine]:
    unpacker = Unpacker(FromEngine, MAX_MESSAGE)
    while True:
        try:
            data = await reader.read(RECEIVE_BYTES)
        except ConnectionError:
            return
        if not data:
            return
        for message in unpacker.feed(data):
            yield message
