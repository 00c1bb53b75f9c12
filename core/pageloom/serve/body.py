"""The bodies of requests, which nobody may make as large or as slow as they like."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable

from starlette.requests import ClientDisconnect

from pageloom.config.schema import ServerConfig
from pageloom.serve.errors import APIError, client_left, stalled, too_slow

MIN_RATE = 4096  # bytes per second on average, once ``stall_seconds`` are over


async def read_body(
    stream: AsyncGenerator[bytes],
    config: ServerConfig,
    clock: Callable[[], float] = time.monotonic,
) -> bytes:
    """All of ``stream``, whose end may be an empty part. Raises `APIError` for more than is
    allowed, and for a client that goes, stops in the middle, or as good as does."""
    data, deadline = bytearray(), clock() + config.stall_seconds
    try:
        while part := await asyncio.wait_for(anext(stream, b""), config.stall_seconds):
            data += part
            if len(data) > config.max_body_bytes:
                raise APIError(f"the body is larger than {config.max_body} (server.max_body)", 413)
            if clock() > deadline + len(data) / MIN_RATE:
                raise too_slow(MIN_RATE)
    except TimeoutError as error:
        raise stalled(config.stall_seconds) from error
    except ClientDisconnect as error:
        raise client_left() from error
    return bytes(data)
