"""Messages over a stream of bytes: each is its length, four bytes in network order, and then
MessagePack. Nothing is pickled."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

_HEADER = struct.Struct("!I")


def frame(body: bytes) -> bytes:
    """An encoded message with its length before it."""
    return _HEADER.pack(len(body)) + body


class Unpacker:
    """Bytes in, as they come; messages of the union ``kind`` out."""

    def __init__(self, kind: Any, max_message: int) -> None:
        """What is longer than ``max_message`` (bytes) is taken for no message at all."""
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._max_message = max_message
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes. Raises `ValueError` for what is none."""
        self._buffer += data
        while len(self._buffer) >= _HEADER.size:
            (size,) = _HEADER.unpack_from(self._buffer)
            if size > self._max_message:
                raise ValueError(f"a message of {size:,} bytes is not one of ours")
            if len(self._buffer) < _HEADER.size + size:
                return
            body = bytes(memoryview(self._buffer)[_HEADER.size : _HEADER.size + size])
            del self._buffer[: _HEADER.size + size]
            yield self._decoder.decode(body)
