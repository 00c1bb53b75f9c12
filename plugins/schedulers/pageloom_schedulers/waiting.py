"""Waiting requests in an order of the policy's own."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Protocol

from pageloom.contract import RequestView


class WaitingQueue(Protocol):
    """What a policy asks of a queue."""

    def push(self, request: RequestView) -> None:
        """Queue a request that arrived."""

    def push_back(self, request: RequestView) -> None:
        """Queue a request again that had been taken out."""

    def first(self) -> RequestView | None:
        """The request to be admitted next."""

    def pop(self) -> RequestView:
        """Take out the `first`. Raises `IndexError` if there is none."""

    def end(self, request: RequestView) -> None:
        """Forget a request that ended, waiting or not."""


class RankedQueue:
    """A heap by a rank that is taken when a request is queued, the lowest first.

    Of equal ranks, those pushed back come first, then the others in the order they were pushed.
    Each call costs O(log n) of n that wait. A request that ended leaves the heap when it comes to
    the top, or when half of the heap is such.
    """

    def __init__(self, rank: Callable[[RequestView], float]) -> None:
        self._rank = rank
        self._heap: list[tuple[float, int, RequestView]] = []
        self._waiting: set[RequestView] = set()
        self._later = count(0)
        self._earlier = count(-1, -1)

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: RequestView) -> None:
        self._push(request, next(self._later))

    def push_back(self, request: RequestView) -> None:
        self._push(request, next(self._earlier))

    def first(self) -> RequestView | None:
        heap = self._heap
        while heap and heap[0][2] not in self._waiting:
            heappop(heap)
        return heap[0][2] if heap else None

    def pop(self) -> RequestView:
        if self.first() is None:
            raise IndexError("no request is waiting")
        request = heappop(self._heap)[2]
        self._waiting.remove(request)
        return request

    def end(self, request: RequestView) -> None:
        self._waiting.discard(request)
        if len(self._heap) > 2 * len(self._waiting) + 32:
            self._heap = [entry for entry in self._heap if entry[2] in self._waiting]
            heapify(self._heap)

    def _push(self, request: RequestView, tie: int) -> None:
        heappush(self._heap, (self._rank(request), tie, request))
        self._waiting.add(request)
