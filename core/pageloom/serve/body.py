"""The bodies of requests, which nobody may make as large or as slow as they like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from starlette.requests import ClientDisconnect

from pageloom.config.schema import ServerConfig
from pageloom.serve.errors import client_left, stalled, too_large, too_slow

MIN_RATE = 4096  # bytes per second on average, once ``stall_seconds`` are over


async def read_body(
    stream: AsyncGenerator[bytes],
    config: ServerConfig,
    declared: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """All of ``stream``, whose end may be an empty part; it was ``declared`` to have so many bytes.
    Raises `APIError` for more than is allowed, and for a client that goes, stops in the middle, or
    as good as does."""
    if declared > config.max_body_bytes:  # before the client is told to go on
        raise too_large(config.max_body)
    data, deadline = bytearray(), clock() + config.stall_seconds
    try:
        while part := await asyncio.wait_for(anext(stream, b""), config.stall_seconds):
            data += part
            if len(data) > config.max_body_bytes:
                raise too_large(config.max_body)
            if clock() > deadline + len(data) / MIN_RATE:
                raise too_slow(MIN_RATE)
    except TimeoutError as error:
        raise stalled(config.stall_seconds) from error
    except ClientDisconnect as error:
        raise client_left() from error
    return bytes(data)
