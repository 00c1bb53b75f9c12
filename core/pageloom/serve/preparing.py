"""Requests of the engine process that wait for their grammars, beside the steps."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from pageloom.engine.engine import Engine
from pageloom.scheduling import Guide, SamplingParams
from pageloom.serve.wire import Submit

THREADS = 2


@dataclass(frozen=True)
class Prepared:
    """A request that can be opened, or refused."""

    message: Submit
    params: SamplingParams
    guide: Guide | ValueError | None


class Preparing:
    """Compiles grammars in threads. `fileno` can be read from once `take` has something."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._threads = ThreadPoolExecutor(THREADS, "pageloom-grammars")
        self._open: dict[str, Submit] = {}
        self._done: SimpleQueue[Prepared] = SimpleQueue()
        self._receiver, self._sender = socket.socketpair()
        self._receiver.setblocking(False)
        self._sender.setblocking(False)

    def __len__(self) -> int:
        return len(self._open)

    def fileno(self) -> int:
        return self._receiver.fileno()

    def start(self, message: Submit, params: SamplingParams) -> None:
        self._open[message.id] = message
        self._threads.submit(self._compile, message, params)

    def cancel(self, request_id: str) -> bool:
        """Whether there was such a request. It is not taken any more."""
        return self._open.pop(request_id, None) is not None

    def take(self) -> Iterator[Prepared]:
        """Those that are done."""
        try:
            self._receiver.recv(1 << 12)
        except BlockingIOError:
            return
        while True:
            try:
                prepared = self._done.get_nowait()
            except Empty:
                return
            if self._open.get(prepared.message.id) is prepared.message:
                del self._open[prepared.message.id]
                yield prepared

    def _compile(self, message: Submit, params: SamplingParams) -> None:
        guide: Guide | ValueError | None
        try:
            guide = self._engine.compile_guide(params)
        except Exception as error:
            guide = error if isinstance(error, ValueError) else ValueError(f"structured: {error}")
        self._done.put(Prepared(message, params, guide))
        with suppress(BlockingIOError):  # it can be read from already
            self._sender.send(b"\0")
