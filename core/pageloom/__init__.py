"""Pageloom: an LLM inference engine assembled from plugins, by YAML."""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pageloom.engine.async_engine import AsyncEngine
    from pageloom.engine.engine import Engine
    from pageloom.scheduling import SamplingParams, StructuredOutput

__all__ = ["AsyncEngine", "Engine", "SamplingParams", "StructuredOutput", "__version__"]
__version__ = "0.1.0"

# Threads of torch's OpenMP (GNU's) spin at the end of each parallel region, by default so long
# that one other busy process on the machine makes a decode step several times slower. This many
# spins still bridge the gap between two small operations. Only read if torch is not loaded yet.
os.environ.setdefault("GOMP_SPINCOUNT", "5000")

_HOMES = {
    "AsyncEngine": "pageloom.engine.async_engine",
    "Engine": "pageloom.engine.engine",
    "SamplingParams": "pageloom.scheduling",
    "StructuredOutput": "pageloom.scheduling",
}


def __getattr__(name: str) -> Any:
    """Import the engine, and torch with it, only when it is used."""
    if name not in _HOMES:
        raise AttributeError(f"module 'pageloom' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
