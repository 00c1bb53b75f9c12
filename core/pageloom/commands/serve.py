"""``pageloom serve``: answer the OpenAI API over HTTP."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Annotated, Literal

import typer

from pageloom.commands.options import ConfigArgument, SetOption
from pageloom.errors import PageloomError

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]
NEEDED = ("fastapi", "uvicorn", "msgspec", "llguidance", "prometheus_client")


def serve(
    path: ConfigArgument,
    overrides: SetOption,
    host: Annotated[str | None, typer.Option(help="As server.host.")] = None,
    port: Annotated[int | None, typer.Option(help="As server.port.")] = None,
    log_format: Annotated[LogFormat, typer.Option(help="json: an object per line.")] = "text",
    log_level: Annotated[
        LogLevel | None, typer.Option(help="From info on, each request is logged.")
    ] = None,
) -> None:
    """Serve the OpenAI API over HTTP until SIGTERM or Ctrl-C."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise PageloomError(f"serving needs {', '.join(missing)}: pip install 'pageloom[serve]'")
    from pageloom.serve import logs
    from pageloom.serve.leave import leave
    from pageloom.serve.run import serve as run

    logs.configure(log_format, "server")
    if log_level is not None:
        logging.getLogger("pageloom").setLevel(log_level.upper())
    given = [("server.host", host), ("server.port", port)]
    leave(run(path, [*overrides, *(f"{k}={v}" for k, v in given if v is not None)]))
