"""From a configuration to a server that runs until it is told to stop, or its engine is gone."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import uvicorn

from pageloom.config import Config, load_config
from pageloom.engine.load_model import load_tokenizer
from pageloom.engine.prompts import PromptEncoder
from pageloom.errors import PageloomError, counted
from pageloom.serve.app import create_app
from pageloom.serve.auth import Keys, read_keys
from pageloom.serve.calls import ToolStyle
from pageloom.serve.client import EngineDiedError
from pageloom.serve.connection import Connection
from pageloom.serve.engines import Engines, make_engines
from pageloom.serve.gate import Gate
from pageloom.serve.listen import allow_many_files, bind, cannot_listen, warn_if_open
from pageloom.serve.logs import announce
from pageloom.serve.replicas import Replicas
from pageloom.serve.restart import start_again
from pageloom.serve.service import Service

log = logging.getLogger(__name__)

# Seconds that a connection may rest between two requests: longer than clients (httpx 5) and load
# balancers (60) keep theirs, since one that sends on a connection we just closed gets an error.
KEEP_ALIVE = 75
FAREWELL = 2  # seconds for answers that are on their way when the server closes


def serve(path: str, overrides: Sequence[str]) -> int:
    """Run until SIGTERM, Ctrl-C, or the engine's end; the exit code, which is 1 if the engine died
    and did not come back. Raises `PageloomError` if it cannot start."""
    config = load_config(path, overrides)
    keys = read_keys(config.server)
    allow_many_files()
    with bind(config.server) as listener:
        warn_if_open(config.server.host, bool(keys))
        return asyncio.run(_serve(config, keys, make_engines(config, path, overrides), listener))


async def _serve(config: Config, keys: Keys, client: Engines, listener: socket.socket) -> int:
    told = _catch_signals(client)
    starting = asyncio.create_task(_start(config, client))
    telling = asyncio.create_task(told.wait())
    try:
        await asyncio.wait({starting, telling}, return_when=asyncio.FIRST_COMPLETED)
        if not starting.done():
            return 0
        return await _run(config, keys, starting.result(), listener, told)
    finally:
        for task in (starting, telling):
            task.cancel()
        await asyncio.gather(starting, telling, return_exceptions=True)
        await client.stop()


def _catch_signals(client: Engines) -> asyncio.Event:
    """What the first SIGTERM or Ctrl-C sets. The second ends everything at once."""
    told = asyncio.Event()

    def on_signal(signum: int) -> None:
        if told.is_set():
            client.kill()
            log.warning("ended by a second signal; what was open is lost")
            os._exit(128 + signum)
        told.set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, on_signal, signum)
    return told


async def _start(config: Config, client: Engines) -> Service:
    """Load the tokenizer here while the model loads there. Raises `PageloomError`."""
    starting = asyncio.create_task(client.start())
    try:
        tokenizer, _ = await asyncio.gather(asyncio.to_thread(load_tokenizer, config), starting)
    except EngineDiedError as error:
        raise PageloomError(str(error)) from error
    finally:
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
    return Service(
        config.server,
        client,
        PromptEncoder(tokenizer, client.vocab_size, client.info.max_model_len),
        model=config.server.model_name or default_name(config.model.path),
        root=default_name(config.model.path),
        tool_style=ToolStyle.of(config.loaded_plugins, config.server.tool_parser, tokenizer),
    )


async def _run(
    config: Config, keys: Keys, service: Service, listener: socket.socket, told: asyncio.Event
) -> int:
    most = config.server.max_waiting
    seats = config.scheduler.max_num_seqs * config.parallel.most_replicas
    app = Gate(create_app(service), keys, None if most is None else most + seats)
    server = Server(
        uvicorn.Config(
            app,
            http=partial(Connection, config.server.stall_seconds),  # type: ignore[arg-type]
            ws="none",
            lifespan="off",
            log_config=None,  # what it logs is written as all else is
            log_level="error",  # not each request that is none
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=FAREWELL,
        ),
        service.model,
    )
    ending = asyncio.create_task(_end(server, service, told))
    try:
        await server.serve([listener])
        return await ending
    except OSError as error:  # someone else listens there since it was bound
        raise cannot_listen(config.server, error) from error
    finally:
        ending.cancel()
        await asyncio.gather(ending, return_exceptions=True)
        await service.grammars.close()


class Server(uvicorn.Server):
    """Says where it is reached, and leaves the signals of the process to others."""

    def __init__(self, config: uvicorn.Config, model: str) -> None:
        super().__init__(config)
        self._model = model

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for listener in sockets or []:
            host, port = listener.getsockname()[:2]
            at = f"[{host}]" if ":" in host else host
            announce(f"{self._model} is served at http://{at}:{port}/v1")


async def _end(server: Server, service: Service, told: asyncio.Event) -> int:
    """Close the server once it was told to stop, or has no engine any more; the exit code."""
    watching = asyncio.create_task(_watch(service))
    telling = asyncio.create_task(told.wait())
    try:
        await asyncio.wait({watching, telling}, return_when=asyncio.FIRST_COMPLETED)
        code = 0 if told.is_set() else 1
    finally:
        for task in (watching, telling):
            task.cancel()
        await asyncio.gather(watching, telling, return_exceptions=True)
    await _drain(service)
    server.should_exit = True
    return code


async def _watch(service: Service) -> None:
    """Returns when the engine has died, unless it is to be started again and can be."""
    client = service.client
    while True:
        await client.died.wait()
        if isinstance(client, Replicas):  # which has tried
            return
        if not (service.config.restart_engine and await start_again(client)):
            return


async def _drain(service: Service) -> None:
    """Let open requests go on for as long as is allowed. What is open then ends with an error."""
    client, clock = service.client, asyncio.get_running_loop().time
    service.draining = True
    log.info("draining: %s open", counted(client.num_open, "request"))
    deadline = clock() + service.config.drain_seconds
    while client.num_open and clock() < deadline:
        await asyncio.sleep(0.05)
    if client.num_open:
        log.warning(
            "%s still open after %g seconds (server.drain_seconds)",
            counted(client.num_open, "request"),
            service.config.drain_seconds,
        )
    await client.stop()


def default_name(path: str) -> str:
    """A hub id as it is; of a file or folder the last part, since its path is nobody's business."""
    return Path(path).name if Path(path).exists() else path
