"""The id by which a request is found again, in the client's log and in ours."""

from __future__ import annotations

import re
import uuid
from contextvars import ContextVar

HEADER = b"x-request-id"
_FIT = re.compile(rb"[\x21-\x7e]{1,128}")

request_id: ContextVar[str] = ContextVar("request_id", default="")
"""Of the HTTP request that the running task serves; empty outside of one."""


def choose(sent: bytes | None) -> str:
    """What the client sent, if that is visible ASCII of at most 128 characters; else a new one."""
    if sent is not None and _FIT.fullmatch(sent):
        return sent.decode("ascii")
    return uuid.uuid4().hex
