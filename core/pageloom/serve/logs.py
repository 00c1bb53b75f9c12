"""What the server and its engine process write to standard error: text for people to read, or a
JSON object per line for what gathers logs."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

from pageloom.serve.request_id import request_id

FORMATS = ("text", "json")

log = logging.getLogger(__name__)
_configured = "text"


class JSONFormatter(logging.Formatter):
    """``time`` (UTC), ``level``, ``process``, ``logger``, ``message``; in a request its
    ``request_id``, with an error its ``exception``, and the ``fields`` that a record brings as
    ``extra={"fields": {...}}``."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if name := request_id.get():
            entry["request_id"] = name
        entry |= getattr(record, "fields", {})
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


def configure(form: str, process: str) -> None:
    """All that is logged from now on has this format; ``process`` is its part of Pageloom."""
    global _configured
    _configured = form
    named = "" if process == "server" else f"{process}: "
    handler = logging.StreamHandler()
    handler.setFormatter(
        JSONFormatter(process)
        if form == "json"
        else logging.Formatter(f"%(levelname)s: {named}%(message)s")
    )
    logging.basicConfig(handlers=[handler], force=True)
    # It warns of what is written to a client that has just gone, which is no news here.
    logging.getLogger("asyncio").setLevel(logging.ERROR)


def configured() -> str:
    """The format, for another process to have the same."""
    return _configured


def announce(message: str) -> None:
    """Say what whoever has started the server is waiting for, whatever the level of the log is."""
    if _configured == "json":
        record = log.makeRecord(log.name, logging.INFO, "", 0, message, (), None)
        log.handle(record)
    else:
        print(message, file=sys.stderr, flush=True)
