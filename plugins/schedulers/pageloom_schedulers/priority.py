"""Preemptive priorities."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from pageloom.contract import RequestView
from pageloom_schedulers.policy import Policy


class Priority(Policy):
    """The request of the lowest ``priority`` first, running or waiting; among equals, the earliest.

    A request gains one level of priority for every ``ageing_seconds`` that passed since it
    arrived, so that none starves. A waiting request that is at least one level better than a
    running one takes its blocks and seats, if it lacks any. Of the running ones, those within one
    level of the worst give way first, and ``victim`` chooses among them.
    """

    @dataclass
    class Config(Policy.Config):
        ageing_seconds: float = 30.0
        """Seconds since its arrival that are worth as much as a ``priority`` lower by 1."""

        def __post_init__(self) -> None:
            if not 0 < self.ageing_seconds < inf:
                raise ValueError(
                    f"ageing_seconds must be more than 0 and finite, not {self.ageing_seconds}"
                )

    config: Config

    def rank(self, request: RequestView) -> float:
        """In levels of priority."""
        return request.priority + request.arrival_time / self.config.ageing_seconds

    def order(self, running: Sequence[RequestView]) -> Sequence[RequestView]:
        return sorted(running, key=self.rank)

    def urgent(self, running: RequestView) -> RequestView | None:
        first = self.queue.first()
        return first if first is not None and self._is_worse(running, first) else None

    def expendable(self, candidates: Sequence[RequestView]) -> Sequence[RequestView]:
        worst = max(candidates, key=self.rank)
        return [request for request in candidates if not self._is_worse(worst, request)]

    def _is_worse(self, one: RequestView, other: RequestView) -> bool:
        """Whether ``one`` is at least one level worse than ``other``."""
        return self.rank(one) >= self.rank(other) + 1
