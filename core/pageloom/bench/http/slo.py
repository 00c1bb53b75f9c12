"""Service-level objectives: what a request must keep to count for goodput."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pageloom.bench.http.target import Outcome
from pageloom.errors import PageloomError, shorten

SLO = Mapping[str, float]  # seconds at most, by one of `NAMES`
NAMES = ("ttft", "tpot", "e2e")


def parse_slo(text: str) -> SLO:
    """``"ttft=0.5,tpot=0.1"``. Raises `PageloomError`."""
    slo = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name.strip() not in NAMES or not 0 < limit < math.inf:
            raise PageloomError(
                f"--slo has {shorten(part)!r}, but each part must be {', '.join(NAMES[:-1])} or "
                f"{NAMES[-1]}, then = and seconds, such as ttft=0.5,tpot=0.1"
            )
        slo[name.strip()] = limit
    return slo


def keeps(outcome: Outcome, slo: SLO) -> bool:
    """Whether a request succeeded within all limits. One of a single token has no TPOT to keep."""
    if outcome.error:
        return False
    return all((getattr(outcome, name) or 0) <= limit for name, limit in slo.items())
