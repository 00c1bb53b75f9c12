"""What the server and its engine process tell each other over a local socket.

As `pageloom.contract.framing` has it.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from pageloom.contract import EngineInfo
from pageloom.contract.framing import frame
from pageloom.engine.outputs import CompletionChunk

MAX_MESSAGE = 1 << 28  # bytes; what is longer is no message of ours


class Submit(msgspec.Struct, tag=True):
    """Queue a request. Answered by `Steps` with its chunks, or by `Refused`."""

    id: str
    prompt: list[int]
    params: dict[str, Any]  # fields of `SamplingParams`; those left out have their defaults
    priority: int = 0
    user: str = ""
    cache_salt: str = ""


class Abort(msgspec.Struct, tag=True):
    """End a request. Whoever sends this expects nothing more of it."""

    id: str


class Inspect(msgspec.Struct, tag=True):
    """Asks for `Inspection`."""


class Ping(msgspec.Struct, tag=True):
    """Asks for `Pong`."""


class Ready(msgspec.Struct, tag=True):
    """The first message of an engine process: its model is loaded."""

    info: EngineInfo
    vocab_size: int


class Failed(msgspec.Struct, tag=True):
    """The first and last message of an engine process that cannot start."""

    reason: str


class Refused(msgspec.Struct, tag=True):
    """A request was not queued, because of something its client can change."""

    id: str
    reason: str
    field: str | None = None  # that is at fault, if it is known


class Steps(msgspec.Struct, tag=True):
    """What came out since the last message."""

    chunks: list[CompletionChunk]


class Pong(msgspec.Struct, tag=True):
    """The engine process goes on: this comes between two steps."""


class Inspection(msgspec.Struct, tag=True):
    """The state of the engine process between two steps."""

    metrics: bytes  # in the text format of Prometheus
    open_requests: int
    aborted_requests: int  # so far, because whoever asked has gone
    blocks_used: int
    problem: str  # what `check_integrity` found, if no request is open; empty if nothing

    def live_metrics(self) -> bytes:
        """What is so at this moment, whereas `metrics` are of the last step."""
        values = [
            ("pageloom_open_requests", "gauge", self.open_requests),
            ("pageloom_aborted_requests_total", "counter", self.aborted_requests),
            ("pageloom_blocks_used", "gauge", self.blocks_used),
            ("pageloom_blocks_lost", "gauge", int(bool(self.problem))),
        ]
        return "".join(f"# TYPE {n} {kind}\n{n} {v}\n" for n, kind, v in values).encode()


ToEngine = Submit | Abort | Inspect | Ping
FromEngine = Ready | Failed | Refused | Steps | Inspection | Pong

M = TypeVar("M")


def pack(message: ToEngine | FromEngine) -> bytes:
    body = msgspec.msgpack.encode(message)
    return frame(body)
