"""What the engine's process and those of its ranks tell each other over a local socket.

Each message is its length, four bytes in network order, and then MessagePack. Nothing is pickled.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec

from pageloom.contract import WorkerReport

HEADER = struct.Struct("!I")
MAX_MESSAGE = 1 << 30  # bytes; what is longer is no message of ours
RECEIVE_BYTES = 1 << 18


class Start(msgspec.Struct, tag=True):
    """Load the model. Answered by `Ready`."""

    blueprint: str
    rank: int
    store_port: int  # where the ranks meet, on this machine
    search_path: list[str]  # of the engine's process, for modules
    log_levels: dict[str, int]  # by logger


class Allocate(msgspec.Struct, tag=True):
    """Make the KV cache. Answered by `Allocated`."""

    num_blocks: int
    host_blocks: int


class Run(msgspec.Struct, tag=True):
    """Compute a step. Answered by `Done`."""

    step: bytes


class Ping(msgspec.Struct, tag=True):
    """Asks for `Pong`, which a rank sends whatever it computes or waits for."""


class Ready(msgspec.Struct, tag=True):
    report: WorkerReport


class Allocated(msgspec.Struct, tag=True):
    pass


class Done(msgspec.Struct, tag=True):
    output: bytes  # empty on all ranks but the one that answers


class Pong(msgspec.Struct, tag=True):
    doing: str  # such as "waits for other ranks in send"; empty if nothing


class Log(msgspec.Struct, tag=True):
    """A rank has something to say, at any time."""

    logger: str
    level: int
    message: str


class Refused(msgspec.Struct, tag=True):
    """The last message of a rank whose model cannot be loaded, in a sentence for the user."""

    reason: str


class Failed(msgspec.Struct, tag=True):
    """The last message of a rank that cannot go on."""

    reason: str
    by_others: bool  # whether the cause is that it could not reach another rank


ToRank = Start | Allocate | Run | Ping
FromRank = Ready | Allocated | Done | Pong | Log | Refused | Failed


def pack(message: ToRank | FromRank) -> bytes:
    body = msgspec.msgpack.encode(message)
    if len(body) > MAX_MESSAGE:
        raise ValueError(f"a message of {len(body):,} bytes is too long")
    return HEADER.pack(len(body)) + body


class Unpacker:
    """Bytes in, as they come; messages of the union ``kind`` out."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """The messages that ``data`` completes. Raises `ValueError` for what is none."""
        self._buffer += data
        while len(self._buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(self._buffer)
            if size > MAX_MESSAGE:
                raise ValueError(f"a message of {size:,} bytes is not one of ours")
            if len(self._buffer) < HEADER.size + size:
                return
            body = bytes(memoryview(self._buffer)[HEADER.size : HEADER.size + size])
            del self._buffer[: HEADER.size + size]
            yield self._decoder.decode(body)
