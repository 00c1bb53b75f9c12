"""Waiting requests by tenant, and what each tenant was served."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection
from heapq import heapify, heappop, heappush, heapreplace
from itertools import count
from math import inf
from operator import attrgetter

from pageloom.contract import RequestView
from pageloom_schedulers.waiting import RankedQueue

# Tenants without open requests whose counters are kept, in case they come back.
MAX_IDLE_TENANTS = 10_000


class TenantQueue:
    """Implements `WaitingQueue`: the earliest of the tenant with the lowest counter first.

    A counter is compared as if it were ``ageing`` lower for each second that the tenant's first
    request has waited. Each call costs O(log n) of n requests and tenants that wait.
    """

    def __init__(self, ageing: float) -> None:
        self._ageing = ageing
        self._queues: dict[str, RankedQueue] = {}  # of tenants who have requests waiting
        self._by_rank = _Lowest(self._queues, self._rank)
        self._by_counter = _Lowest(self._queues, self.counter)
        self._counters: dict[str, float] = {}  # of tenants who have open requests
        self._open: Counter[str] = Counter()  # requests
        self._idle: dict[str, float] = {}  # counters of other tenants, idle the longest first
        self._last = ""  # the tenant who ran out of waiting requests last

    def push(self, request: RequestView) -> None:
        """Queue a request that arrived; its tenant's counter is lifted if it had none waiting."""
        tenant = request.user
        self._open[tenant] += 1
        counter = self.counter(tenant)
        self._idle.pop(tenant, None)
        if tenant not in self._queues:
            lowest = self._by_counter.first()
            counter = max(counter, self.counter(self._last if lowest is None else lowest))
        self._counters[tenant] = counter
        self._queue_of(tenant).push(request)
        self._note(tenant)

    def push_back(self, request: RequestView) -> None:
        self._queue_of(request.user).push_back(request)
        self._note(request.user)

    def first(self) -> RequestView | None:
        tenant = self._by_rank.first()
        return None if tenant is None else self._queues[tenant].first()

    def pop(self) -> RequestView:
        tenant = self._by_rank.first()
        if tenant is None:
            raise IndexError("no request is waiting")
        request = self._queues[tenant].pop()
        self._drop_if_empty(tenant)
        return request

    def end(self, request: RequestView) -> None:
        tenant = request.user
        if tenant in self._queues:
            self._queues[tenant].end(request)
            self._drop_if_empty(tenant)
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
            self._idle[tenant] = self._counters.pop(tenant)
            if len(self._idle) > MAX_IDLE_TENANTS:
                del self._idle[next(iter(self._idle))]

    def charge(self, tenant: str, cost: float) -> None:
        """Add what a tenant with open requests was served to its counter."""
        self._counters[tenant] += cost

    def counter(self, tenant: str) -> float:
        return self._counters.get(tenant, self._idle.get(tenant, 0.0))

    def _rank(self, tenant: str) -> float:
        first = self._queues[tenant].first()
        return inf if first is None else self.counter(tenant) + self._ageing * first.arrival_time

    def _queue_of(self, tenant: str) -> RankedQueue:
        return self._queues.setdefault(tenant, RankedQueue(attrgetter("arrival_time")))

    def _note(self, tenant: str) -> None:
        """A request of the tenant was queued: it may be its only or its earliest one."""
        if len(self._queues[tenant]) == 1:
            self._by_counter.push(tenant)
        self._by_rank.push(tenant)

    def _drop_if_empty(self, tenant: str) -> None:
        if not self._queues[tenant]:
            del self._queues[tenant]
            self._last = tenant


class _Lowest:
    """The member of ``members`` with the lowest key.

    Keys grow unnoticed: one that comes to the top of the heap is looked up again, and sinks if it
    has grown. When one falls, or a member is new, it must be pushed.
    """

    def __init__(self, members: Collection[str], key: Callable[[str], float]) -> None:
        self._members = members
        self._key = key
        self._heap: list[tuple[float, int, str]] = []
        self._ties = count()

    def push(self, member: str) -> None:
        heappush(self._heap, self._entry(member))
        if len(self._heap) > 2 * len(self._members) + 32:
            self._heap = [self._entry(member) for member in self._members]
            heapify(self._heap)

    def first(self) -> str | None:
        heap = self._heap
        while heap:
            key, _, member = heap[0]
            if member not in self._members:
                heappop(heap)
            elif key < self._key(member):
                heapreplace(heap, self._entry(member))
            else:
                return member
        return None

    def _entry(self, member: str) -> tuple[float, int, str]:
        return self._key(member), next(self._ties), member
