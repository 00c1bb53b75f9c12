"""Shortest job first."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Any

from pageloom.contract import RequestView, SchedulerView
from pageloom_schedulers.policy import Policy

_WINDOW = 256  # ended branches that the mean output length is of, weighted exponentially


class SJF(Policy):
    """Admits the waiting request that is expected to take the fewest tokens until its end.

    That is what it has pending (the prompt, or after a preemption everything), and for each
    branch the mean output length of the requests that ended so far, but no more than its
    ``max_tokens`` allow; before any ended, just those. A preempted request is expected to go on
    for as long again, as if output lengths were memoryless.

    A request is judged when it is queued, and gains ``ageing_tokens_per_second`` while it waits, so
    that none starves.
    """

    @dataclass
    class Config(Policy.Config):
        ageing_tokens_per_second: float = 20.0
        """Tokens of work that a second of waiting outweighs."""

        def __post_init__(self) -> None:
            rate = self.ageing_tokens_per_second
            if not 0 < rate < inf:
                raise ValueError(
                    f"ageing_tokens_per_second must be more than 0 and finite, not {rate}"
                )

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._drawn: dict[RequestView, int] = {}  # output tokens per branch of open requests
        self._ended = 0
        self._mean = inf  # output tokens of a branch that ended

    def rank(self, request: RequestView) -> float:
        left = min(request.max_tokens - self._drawn.get(request, 0), self._mean)
        work = request.pending_tokens + request.num_branches * left
        return work + self.config.ageing_tokens_per_second * request.arrival_time

    def note(self, view: SchedulerView) -> None:
        for request in view.finished:
            if drawn := self._drawn.pop(request, 0):
                self._ended = min(self._ended + 1, _WINDOW)
                mean = drawn if self._ended == 1 else self._mean
                self._mean = mean + (drawn - mean) / self._ended
        super().note(view)

    def served(self, request: RequestView, tokens: int) -> None:
        if tokens == request.pending_tokens:  # nothing else is pending: it draws
            self._drawn[request] = self._drawn.get(request, 0) + 1
