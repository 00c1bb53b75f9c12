"""What the engine's process and those of its ranks tell each other over a local socket.

As `pageloom.contract.framing` has it.
"""

from __future__ import annotations

import msgspec

from pageloom.contract import WorkerReport
from pageloom.contract.framing import frame

MAX_MESSAGE = 1 << 30  # bytes; what is longer is no message of ours
RECEIVE_BYTES = 1 << 18
LOAD_SECONDS = 3600.0  # that ranks may take to load, unless an option says otherwise


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
    return frame(body)


def one_line(error: BaseException) -> str:
    """What `Failed` says of an exception."""
    return " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
