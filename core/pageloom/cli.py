"""The command ``pageloom``. Each command is a module of `pageloom.commands`."""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated

import typer

from pageloom.commands.bench import bench
from pageloom.commands.chat import chat
from pageloom.commands.config import config
from pageloom.commands.generate import generate
from pageloom.commands.plugins import plugins
from pageloom.commands.quantize import quantize
from pageloom.commands.serve import serve
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
app.command()(serve)
app.command()(plugins)
app.command()(config)
app.command()(quantize)
app.add_typer(bench, name="bench")


def _version(wanted: bool) -> None:
    if wanted:
        print(version("pageloom"))
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug messages; goes anywhere.")
    ] = False,
    _: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
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
    if sys.stdin is None:  # the shell closed it: there is nothing to read
        sys.stdin = open(os.devnull)  # noqa: SIM115
    try:
        try:
            app([*debug, *arguments])
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough
        _abandon_output()
        sys.exit(1)
    except Exception as error:
        _abandon_output()
        if debug:
            raise
        message, code = _explain(error)
        print(f"pageloom: {message}", file=sys.stderr)
        sys.exit(code)


def _explain(error: Exception) -> tuple[str, int]:
    """What to say, and the exit code."""
    from pageloom.contract import WorkerError  # late, to start quickly
    from pageloom.scheduling import PolicyError

    if isinstance(error, PageloomError):
        return str(error), 2
    if isinstance(error, PolicyError | WorkerError):
        return str(error), 1
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        return f"the output cannot be written: {error.strerror}", 2
    return f"{one_line(error)} (an unexpected error; --debug shows where)", 1


def _abandon_output() -> None:
    """Python flushes once more when it ends; what cannot be written must go somewhere."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _take_debug(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """``--debug`` may stand after the command too, but not behind ``--``."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    debug = ["--debug"] if "--debug" in arguments[:end] else []
    return debug, [a for i, a in enumerate(arguments) if i >= end or a != "--debug"]
