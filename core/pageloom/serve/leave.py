"""How a process that has loaded torch ends, and how one ends another."""

from __future__ import annotations

import asyncio.subprocess
import atexit
import os
import signal
import sys
from contextlib import suppress
from typing import NoReturn


def leave(code: int) -> NoReturn:
    """End the process without taking torch apart module by module, which takes a second or more."""
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def kill(process: asyncio.subprocess.Process) -> None:
    """End a child process at once, if it still runs. Its own ``kill`` looks first whether it does,
    and then the event loop, which waits for it, never learns how it ended."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
