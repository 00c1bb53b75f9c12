"""How large and how slow the body of a request may be."""

from __future__ import annotations

import asyncio

import pytest

from pageloom.config.schema import ServerConfig
from pageloom.serve.body import MIN_RATE, read_body
from pageloom.serve.errors import APIError

CONFIG = ServerConfig(max_body="1MiB", stall_seconds=60)


def read(parts, seconds):
    """A body of these parts, each of which comes ``seconds`` after the one before."""
    now = 0.0

    async def stream():
        nonlocal now
        for part in parts:
            now += seconds
            yield part

    return asyncio.run(read_body(stream(), CONFIG, clock=lambda: now))


def test_a_large_body_may_take_longer_than_any_pause():
    part = b"a" * (32 << 10)
    assert read([part] * 32, seconds=8) == part * 32


def test_a_small_one_may_come_byte_by_byte_if_that_is_soon_over():
    assert read([b"a"] * 50, seconds=1) == b"a" * 50


@pytest.mark.parametrize("size", [1, MIN_RATE // 2])
def test_one_that_never_ends_is_given_up(size):
    with pytest.raises(APIError, match="less than 4096 bytes per second") as raised:
        read([b"a" * size] * ((1 << 20) // size), seconds=1)
    assert raised.value.status == 408


def test_one_that_is_too_large_is_given_up():
    with pytest.raises(APIError, match=r"larger than 1MiB \(server.max_body\)") as raised:
        read([b"a" * (1 << 20), b"a"], seconds=1)
    assert raised.value.status == 413


def test_a_client_that_sends_nothing_is_not_waited_for():
    async def stream():
        yield b"a"
        await asyncio.Event().wait()

    stalling = ServerConfig(stall_seconds=0.01)
    with pytest.raises(APIError, match="nothing more of the request came") as raised:
        asyncio.run(read_body(stream(), stalling))
    assert raised.value.status == 408
