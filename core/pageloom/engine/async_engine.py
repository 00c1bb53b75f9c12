"""The engine for asyncio: steps run in a thread of their own."""

from __future__ import annotations

import asyncio
import atexit
import logging
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from pageloom.contract import EngineInfo
from pageloom.engine.engine import Engine
from pageloom.engine.open_request import OpenRequest
from pageloom.engine.outputs import CompletionChunk
from pageloom.engine.prompts import Prompt
from pageloom.scheduling import SamplingParams

T = TypeVar("T")
log = logging.getLogger(__name__)


class EngineClosedError(RuntimeError):
    """The engine was shut down, or its thread has died."""


class EngineStepError(RuntimeError):
    """The step that a request was in failed; the cause is chained."""


class AsyncEngine:
    """Many concurrent streams over one `Engine`, which only the engine thread steps.

    Use as an async context manager, or call `shutdown`; at the end of the process it is called.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._calls: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: set[_Stream] = set()  # open ones, of the engine thread
        self._failed: list[tuple[_Stream, CompletionChunk]] = []  # in the step under way
        self._closed = threading.Event()
        self._ended = False  # no call is taken from the queue any more
        self._lock = threading.Lock()  # of putting into the queue, and of `_ended`
        self._thread = threading.Thread(target=self._run, name="pageloom-engine", daemon=True)
        self._thread.start()
        # A daemon thread must not be inside torch when the interpreter goes down.
        atexit.register(self.shutdown)

    @classmethod
    def from_config(cls, path: str | Path, overrides: Sequence[str] = ()) -> AsyncEngine:
        """See `Engine.from_config`. Blocks while the model loads."""
        return cls(Engine.from_config(path, overrides))

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **request: Any
    ) -> AsyncIterator[CompletionChunk]:
        """Complete a prompt and yield chunks as they come.

        Takes the keywords of `Engine.open_request` and raises as it does. Leaving the loop,
        closing the iterator or cancelling the task aborts the request. Raises `EngineStepError`
        if its step fails and `EngineClosedError` if the engine is shut down meanwhile.
        """
        # Tokenizing a long text takes longer than a step, so it is not the engine thread's work.
        token_ids = await asyncio.to_thread(self._engine.encode, prompt)
        if params is not None and "guide" not in request:
            request["guide"] = await asyncio.to_thread(self._engine.compile_guide, params)
        stream = _Stream(asyncio.get_running_loop())
        try:
            await self._call(lambda: self._open(stream, token_ids, params, request))
            unfinished = params.n if params is not None else 1
            while unfinished:
                chunk = await stream.queue.get()
                if isinstance(chunk, Exception):
                    raise chunk
                if chunk.finish_reason:
                    unfinished -= 1
                yield chunk
        finally:
            self._post(lambda: self._close(stream))

    async def abort(self, request_id: str) -> None:
        """End a request; its stream gets a last chunk with ``finish_reason="abort"``."""
        await self._call(lambda: self._engine.abort(request_id))

    def shutdown(self) -> None:
        """Abort what is open and stop the thread. Safe to call twice, and from any thread; only
        when called in the engine thread, as by an observer, it returns before that has ended."""
        atexit.unregister(self.shutdown)
        self._closed.set()
        self._post(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.shutdown)

    # -- between the threads ----------------------------------------------------------------

    def _post(self, function: Callable[[], None]) -> None:
        """Run ``function`` in the engine thread, between steps; here if that has ended."""
        with self._lock:
            if not self._ended:
                self._calls.put(function)
                return
        function()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run ``function`` in the engine thread and wait for what it returns or raises."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                if self._closed.is_set():
                    raise EngineClosedError("the engine is shut down")
                future.set_result(function())
            except Exception as error:
                future.set_exception(error)

        self._post(run)
        return await asyncio.wrap_future(future)

    # -- in the engine thread ---------------------------------------------------------------

    def _run(self) -> None:
        ended = "was shut down"
        try:
            while not self._closed.is_set():
                if self._engine.has_requests:
                    self._run_calls()
                    self._step()
                else:
                    self._calls.get()()
        except BaseException as error:  # such as a plugin's SystemExit
            log.exception("the engine thread died")
            ended = f"died of {type(error).__name__}: {error}"
        finally:
            self._closed.set()
            self._fail_streams(EngineClosedError(f"the engine {ended}"))
            with self._lock:
                self._ended = True
            self._run_calls()

    def _run_calls(self) -> None:
        while True:
            try:
                function = self._calls.get_nowait()
            except Empty:
                return
            function()

    def _step(self) -> None:
        try:
            self._engine.advance()
        except Exception as error:
            failure = EngineStepError(f"the engine step failed: {error}")
            failure.__cause__ = error
            self._fail_streams(failure)
        else:
            for stream, chunk in self._failed:  # requests that failed alone
                stream.send(chunk)
        self._failed.clear()

    def _open(
        self, stream: _Stream, prompt: Prompt, params: SamplingParams | None, request: Any
    ) -> None:
        def deliver(chunk: CompletionChunk) -> None:
            if chunk.finish_reason == "error":
                self._failed.append((stream, chunk))
            elif not stream.send(chunk):
                self._post(lambda: self._close(stream))

        stream.opened = self._engine.open_request(prompt, params, deliver=deliver, **request)
        self._streams.add(stream)

    def _close(self, stream: _Stream) -> None:
        """Forget a stream, and abort its request unless it is finished."""
        self._streams.discard(stream)
        if stream.opened is not None:
            self._engine.close(stream.opened)

    def _fail_streams(self, failure: Exception) -> None:
        for stream in list(self._streams):
            stream.send(failure)
            self._close(stream)


class _Stream:
    """Chunks on their way from the engine thread to an event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[CompletionChunk | Exception] = asyncio.Queue()
        self.opened: OpenRequest | None = None
        self._loop = loop

    def send(self, item: CompletionChunk | Exception) -> bool:
        """Whether the event loop is still there to receive it."""
        try:
            self._loop.call_soon_threadsafe(self.queue.put_nowait, item)
        except RuntimeError:
            return False
        return True
