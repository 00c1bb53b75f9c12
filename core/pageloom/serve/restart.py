"""How an engine that has died comes back."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from pageloom.serve.client import EngineDiedError

log = logging.getLogger(__name__)

RESTART_DELAYS = (0.0, 1.0, 5.0, 15.0, 60.0)  # seconds, before each attempt in turn


class Startable(Protocol):
    async def start(self) -> None:
        """Raises `EngineDiedError`."""


async def start_again(engine: Startable, name: str = "the engine") -> bool:
    """Whether it runs again; if not, it was tried often enough."""
    for attempt, delay in enumerate(RESTART_DELAYS, 1):
        await asyncio.sleep(delay)
        try:
            await engine.start()
        except EngineDiedError as error:
            log.error("attempt %d to start %s again: %s", attempt, name, error)
        else:
            log.warning("%s runs again", name)
            return True
    return False
