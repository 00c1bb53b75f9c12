"""The command ``pageloom``. Each command is a module of `pageloom.commands`."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from pageloom.commands.chat import chat
from pageloom.commands.config import config
from pageloom.commands.generate import generate
from pageloom.commands.plugins import plugins
from pageloom.errors import PageloomError, one_line

app = typer.Typer(
    name="pageloom",
    help="Assemble an LLM inference engine from plugins, by YAML.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command()(generate)
app.command()(chat)
app.command()(plugins)
app.command()(config)


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug messages; goes anywhere.")
    ] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s: %(message)s")
    logging.getLogger("pageloom").setLevel(logging.DEBUG if debug else logging.WARNING)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line (default: ``sys.argv``) and exit.

    Exit codes: 0, or 2 for what the user can put right (one message, no traceback), or 1 for a
    defect of ours or of a plugin.
    """
    debug, arguments = _take_debug(sys.argv[1:] if arguments is None else arguments)
    try:
        app([*debug, *arguments])
    except PageloomError as error:
        if debug:
            raise
        print(f"pageloom: {error}", file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if debug:
            raise
        hint = "an unexpected error; --debug shows where"
        print(f"pageloom: {one_line(error)} ({hint})", file=sys.stderr)
        sys.exit(1)


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """``--debug`` may stand after the command too, but not behind ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = ["--debug"] if "--debug" in arguments[:end] else []
    return debug, [a for i, a in enumerate(arguments) if i >= end or a != "--debug"]
