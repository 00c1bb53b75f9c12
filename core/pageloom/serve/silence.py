"""How a process is noticed that is still there, but does nothing any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

CHECKS = 8  # in the time that an answer may take


async def wait_for_silence(
    ask: Callable[[], None], heard: Callable[[], int], seconds: float
) -> None:
    """Returns once nothing was heard for about ``seconds``, though it was asked all the time.

    ``ask`` sends what has to be answered, ``heard`` counts what has come. Waits are counted, and
    not the time that has passed: if it is this process that stood still, it has to listen first.
    """
    silent = 0
    while silent < CHECKS:
        before = heard()
        ask()
        await asyncio.sleep(seconds / CHECKS)
        silent = silent + 1 if heard() == before else 0
