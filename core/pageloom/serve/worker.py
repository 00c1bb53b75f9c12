"""The engine process: takes requests from a socket, steps, and sends back what comes out."""

from __future__ import annotations

import argparse
import logging
import select
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress

from pageloom.contract import WorkerError
from pageloom.contract.framing import Unpacker
from pageloom.engine.engine import Engine
from pageloom.engine.outputs import CompletionChunk
from pageloom.errors import PageloomError, one_line
from pageloom.scheduling import SamplingParams
from pageloom.scheduling.errors import field_at_fault
from pageloom.serve import logs
from pageloom.serve.leave import leave
from pageloom.serve.preparing import Prepared, Preparing
from pageloom.serve.wire import (
    MAX_MESSAGE,
    Abort,
    Failed,
    FromEngine,
    Inspect,
    Inspection,
    Ping,
    Pong,
    Ready,
    Refused,
    Steps,
    Submit,
    ToEngine,
    pack,
)

log = logging.getLogger(__name__)

RECEIVE_BYTES = 1 << 18
CHECK_MILLISECONDS = 1000  # how often somebody who has nothing to do looks after the workers
MAX_FAILURES = 3  # steps in a row: such as after a GPU's context is lost, none will succeed


class Worker:
    """Serves one connection. A server that does not read keeps no step waiting: what it does not
    take gathers here, and is bounded by what the open requests may still say."""

    def __init__(self, engine: Engine, connection: socket.socket) -> None:
        self._engine = engine
        self._connection = connection
        self._unpacker = Unpacker(ToEngine, MAX_MESSAGE)
        self._outbox: list[CompletionChunk] = []
        self._unsent = bytearray()
        self._failures = 0
        self._aborted = 0
        self._closed = False
        connection.setblocking(False)
        self._preparing = Preparing(engine)
        self._poller = select.poll()
        self._poller.register(connection)
        self._poller.register(self._preparing, select.POLLIN)

    def run(self) -> None:
        """Returns when the connection is closed; raises what made several steps in a row fail."""
        self._send(Ready(self._engine.info, self._engine.vocab_size))
        while not self._closed:
            for message in self._receive(wait=not self._engine.has_requests):
                self._handle(message)
            if self._closed:
                return
            if self._engine.has_requests:
                self._step()
            self._flush()

    def _step(self) -> None:
        try:
            self._engine.advance()
            self._failures = 0
        except WorkerError:
            # That requests have failed is not sent: the server knows it when this process ends,
            # and may have another engine for those that had not begun.
            self._outbox.clear()
            raise
        except Exception:
            # Every open request got a last chunk that says so; the engine itself can go on.
            log.exception("an engine step failed")
            self._failures += 1
            if self._failures == MAX_FAILURES:
                raise

    def _handle(self, message: ToEngine) -> None:
        if isinstance(message, Submit):
            self._submit(message)
        elif isinstance(message, Abort):
            self._abort(message)
        elif isinstance(message, Inspect):
            self._flush()
            self._send(self._inspect())
        elif isinstance(message, Ping):
            self._send(Pong())

    def _submit(self, message: Submit) -> None:
        try:
            params = SamplingParams(**message.params)
        except ValueError as error:
            self._refuse(message, error)
            return
        if params.structured is None:
            self._open(Prepared(message, params, None))
        else:
            self._preparing.start(message, params)

    def _open(self, prepared: Prepared) -> None:
        message = prepared.message
        try:
            if isinstance(prepared.guide, ValueError):
                raise prepared.guide
            self._engine.open_request(
                message.prompt,
                prepared.params,
                guide=prepared.guide,
                request_id=message.id,
                priority=message.priority,
                user=message.user,
                cache_salt=message.cache_salt,
                deliver=self._outbox.append,
            )
        except ValueError as error:
            self._refuse(message, error)

    def _refuse(self, message: Submit, error: ValueError) -> None:
        self._send(Refused(message.id, str(error), field_at_fault(error)))

    def _abort(self, message: Abort) -> None:
        """The request may have ended just before."""
        delivered = len(self._outbox)
        self._engine.abort(message.id)
        self._aborted += len(self._outbox) > delivered or self._preparing.cancel(message.id)

    def _inspect(self) -> Inspection:
        from prometheus_client import generate_latest

        problem = ""
        if not self._engine.has_requests:
            try:
                self._engine.planner.check_integrity()
            except Exception as error:
                problem = str(error)
        planner = self._engine.planner
        open_requests = len(planner.running) + len(planner.waiting) + len(self._preparing)
        return Inspection(
            generate_latest(), open_requests, self._aborted, planner.pool.num_used, problem
        )

    def _receive(self, *, wait: bool) -> Iterator[ToEngine]:
        """What has arrived; with ``wait``, at least one message or the end of the connection."""
        while not self._closed:
            readable, writable = self._poll(wait)
            if writable:
                self._write()
            for prepared in self._preparing.take():
                wait = False
                self._open(prepared)
            if readable:
                for message in self._unpacker.feed(self._read()):
                    wait = False
                    yield message
            elif not wait:
                return

    def _poll(self, wait: bool) -> tuple[bool, bool]:
        """Whether the connection can be read, and whether it takes what is not sent yet."""
        self._poller.modify(
            self._connection, select.POLLIN | (select.POLLOUT if self._unsent else 0)
        )
        found = dict(self._poller.poll(CHECK_MILLISECONDS if wait else 0))
        if wait and not found:
            self._engine.check_workers()
        events = found.get(self._connection.fileno(), 0)
        return bool(events & ~select.POLLOUT), bool(events & select.POLLOUT)

    def _read(self) -> bytes:
        try:
            data = self._connection.recv(RECEIVE_BYTES)
        except OSError:  # the server is gone
            data = b""
        self._closed = not data
        return data

    def _flush(self) -> None:
        if self._outbox:
            self._send(Steps(self._outbox))
            self._outbox.clear()

    def _send(self, message: FromEngine) -> None:
        self._unsent += pack(message)
        self._write()

    def _write(self) -> None:
        """As much as the socket takes now."""
        try:
            while self._unsent:
                del self._unsent[: self._connection.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError:  # the server is gone
            self._closed = True


def main() -> None:
    """``python -m pageloom.serve.worker --socket FD CONFIG [KEY=VALUE ...]``"""
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", type=int, required=True)
    parser.add_argument("--log-level", default="WARNING")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text")
    parser.add_argument("config")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    logs.configure(options.log_format, "engine")
    logging.getLogger("pageloom").setLevel(options.log_level)
    # The server decides when this process ends, and closes the connection then. Whoever tells all
    # processes of a service or of a terminal to end must not take the engine from under it.
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    with socket.socket(fileno=options.socket) as connection:
        leave(serve(connection, options.config, options.overrides))


def serve(connection: socket.socket, config: str, overrides: list[str]) -> int:
    """Load the engine and serve; the exit code."""
    try:
        engine = Engine.from_config(config, overrides, by_server=True)
        load_guides(engine)
    except Exception as error:
        expected = isinstance(error, PageloomError)
        reason = str(error) if expected else f"{one_line(error)} (an unexpected error)"
        log.debug("the engine cannot start", exc_info=error)
        connection.sendall(pack(Failed(reason)))
        return 2 if expected else 1
    try:
        with engine:
            Worker(engine, connection).run()
    except Exception as error:
        log.critical("the engine ends: %s", one_line(error))
        return 1
    return 0


def load_guides(engine: Engine) -> None:
    """Now, since no step could run meanwhile. Where it cannot be done, requests will be told."""
    with suppress(ValueError, ModuleNotFoundError):
        engine.guides.load()


if __name__ == "__main__":
    main()
