"""How many replicas there should be."""

from __future__ import annotations

from dataclasses import dataclass

QUEUE = 4  # requests that wait, per replica, of which another one would take its part
UP_AFTER = 3.0  # seconds that so many must have waited
DOWN_AFTER = 60.0  # seconds that fewer replicas must have been enough
FULL = 0.5  # part of the seats that may be taken where fewer replicas have to do


@dataclass
class Load:
    """Of all replicas together."""

    replicas: int  # those that are being started included
    waiting: int  # requests without a first token
    open: int  # requests, those that wait included


class Scaling:
    """One replica more when requests queue up, one less when fewer would do.

    Both only after a while, since a replica that is started has a model to load, and one that is
    stopped loses its cached prefixes.
    """

    def __init__(
        self,
        least: int,
        most: int,
        seats: int,
        up_after: float = UP_AFTER,
        down_after: float = DOWN_AFTER,
    ) -> None:
        """``seats`` of each replica: the requests that it runs at once. Times in seconds."""
        self._least, self._most, self._seats = least, most, seats
        self._up_after, self._down_after = up_after, down_after
        self._crowded: float | None = None  # since when
        self._roomy: float | None = None

    def replicas(self, load: Load, now: float) -> int:
        """How many there should be at ``now``, in seconds. Called about once a second."""
        count = load.replicas
        crowded = count < self._most and load.waiting > QUEUE * count
        fewer = (count - 1) * self._seats * FULL
        roomy = count > self._least and not load.waiting and load.open <= fewer
        self._crowded = _since(self._crowded, crowded, now)
        self._roomy = _since(self._roomy, roomy, now)
        if self._crowded is not None and now - self._crowded >= self._up_after:
            self._crowded = None
            return count + 1
        if self._roomy is not None and now - self._roomy >= self._down_after:
            self._roomy = None
            return count - 1
        return count


def _since(before: float | None, holds: bool, now: float) -> float | None:
    if not holds:
        return None
    return now if before is None else before
