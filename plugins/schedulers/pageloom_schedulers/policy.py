"""What the policies share: how a step is filled, and who gives way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import count
from operator import attrgetter
from typing import Any

from pageloom.contract import PlanView, RequestView, Scheduler, SchedulerView
from pageloom_schedulers.tokens import PrefillShare, TokenBudget
from pageloom_schedulers.waiting import RankedQueue, WaitingQueue


class Victim(StrEnum):
    """Which of the requests behind one that lacks blocks gives way."""

    last_admitted = "last_admitted"
    least_computed = "least_computed"


class Policy(Scheduler):
    """Serves running requests in `order`, then admits waiting ones in that of its queue.

    - When blocks run out, requests behind the one that lacks them give way, one by one; a request
      that nobody is behind keeps its blocks and waits. So the first in order is never preempted
      and always makes room for itself, and as it stays the first until it ends, there is no
      livelock, whatever the victims.
    - Nobody is admitted in a step in which blocks ran out, and nobody past a waiting request that
      comes first but does not fit: it waits for running requests to end, at most.
    - Nobody is admitted who would take the blocks that running requests will want soon: a request
      that is admitted only to give way again would be computed twice.
    - A waiting request takes blocks and seats from running ones only if it is `urgent`.

    Subclasses say who comes first: by default who arrived first.
    """

    @dataclass
    class Config:
        victim: Victim = Victim.last_admitted
        """Who gives way when blocks run out, of the requests behind the one that lacks them:
        ``last_admitted``, or ``least_computed``, which loses the fewest computed tokens."""
        prefill_share: PrefillShare = PrefillShare.fixed
        """How many tokens of a step go to prefills: ``fixed``, all that decodes leave;
        ``adaptive``, fewer the more branches decode (see `TokenBudget`)."""

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.queue = self.make_queue()
        self._places: dict[RequestView, int] = {}  # of open requests, in order of first admission
        self._admissions = count()

    def schedule(self, view: SchedulerView, plan: PlanView) -> None:
        self.note(view)
        step = _Step(self, view, plan)
        running = self.order(view.running)
        blocked = False  # whether a waiting request could not be admitted
        for index, request in enumerate(running):
            while not blocked and (urgent := self.urgent(request)):
                blocked = not step.admit(urgent, running[index:])
            if request not in step.preempted:
                step.serve(request, running, index + 1)
        while not (blocked or step.crowded) and (first := self.queue.first()):
            blocked = not step.admit(first)
        for request in step.preempted:
            self.queue.push_back(request)

    def make_queue(self) -> WaitingQueue:
        return RankedQueue(self.rank)

    def rank(self, request: RequestView) -> float:
        """Where a request stands among the waiting ones, the lowest first. Taken when it is
        queued.

        Ageing is part of it: if each second of waiting is worth the same to all, the order of two
        waiting requests never changes. So a rank that grows with ``arrival_time``, by what a
        second is worth, need not be taken again, and only so many can pass a request.
        """
        return request.arrival_time

    def order(self, running: Sequence[RequestView]) -> Sequence[RequestView]:
        """Running requests, the first to be served first. Of two, the same one must come first in
        every step. By default it is the one that was admitted first, and who gave way does not
        lose its place."""
        return sorted(running, key=self._places.__getitem__)

    def urgent(self, running: RequestView) -> RequestView | None:
        """The first waiting request, if it is to be served before ``running`` and may make it give
        way. It must then come before it in `order`, too."""
        return None

    def expendable(self, candidates: Sequence[RequestView]) -> Sequence[RequestView]:
        """Those of ``candidates``, latest admitted first, among whom the victim is chosen."""
        return candidates

    def note(self, view: SchedulerView) -> None:
        """Called first in each step."""
        for request in view.arrived:
            self.queue.push(request)
        for request in view.finished:
            self.queue.end(request)
            self._places.pop(request, None)

    def admitted(self, request: RequestView) -> None:
        """Called when a request has left the queue."""
        self._places.setdefault(request, next(self._admissions))

    def served(self, request: RequestView, tokens: int) -> None:
        """Called when a request was granted ``tokens`` tokens, after `admitted`."""


class _Step:
    """One plan being filled."""

    def __init__(self, policy: Policy, view: SchedulerView, plan: PlanView) -> None:
        self.policy = policy
        self.view = view
        self.plan = plan
        self.budget = TokenBudget(view, plan, policy.config.prefill_share)
        self.preempted: dict[RequestView, None] = {}  # in the order in which they gave way
        self.crowded = False  # whether blocks ran out
        self._headroom: int | None = None

    def serve(self, request: RequestView, running: Sequence[RequestView], behind: int) -> None:
        """Run a running request, at the cost of ``running[behind:]`` if need be."""
        granted = self.budget.run(request)
        if not granted and self.budget.refusal == "blocks":
            granted = self._make_room(request, running[behind:])
        if granted:
            self.policy.served(request, granted)

    def admit(self, request: RequestView, behind: Sequence[RequestView] = ()) -> bool:
        """Admit the first waiting request, at the cost of running ones ``behind`` it if need be;
        otherwise only if those that run could all grow by a block."""
        if self._headroom is None:
            self._headroom = sum(_growth(r, self.plan.block_size) for r in self.view.running)
        granted = self.budget.run(request, 0 if behind else self._headroom)
        if not granted and self.budget.refusal != "tokens":
            granted = self._make_room(request, behind)
        if granted:
            self._headroom += _growth(request, self.plan.block_size, granted)
            self.policy.queue.pop()
            self.policy.admitted(request)
            self.policy.served(request, granted)
        return granted > 0

    def _make_room(self, request: RequestView, behind: Sequence[RequestView]) -> int:
        """Preempt one after the other of ``behind``, until the request runs or nobody is left."""
        self.crowded = True
        granted = 0
        while not granted and (victim := self._victim(request, behind)):
            self.plan.preempt(victim)
            self.preempted[victim] = None
            self.budget.release(victim)
            granted = self.budget.run(request)
        return granted

    def _victim(self, request: RequestView, behind: Sequence[RequestView]) -> RequestView | None:
        """Who is to give way next; None if nobody can, or if it would be in vain."""
        allowed = set(behind)
        candidates: Sequence[RequestView] = [
            other
            for other in reversed(self.view.running)
            if other in allowed and self.plan.preemptible(other)
        ]
        if self.budget.refusal == "seats":
            seats = self.plan.seats_left + sum(other.num_branches for other in candidates)
            if seats < request.num_branches:
                return None
        if not candidates or self.budget.refusal == "tokens":
            return None
        candidates = self.policy.expendable(candidates)
        if self.policy.config.victim is Victim.last_admitted:
            return candidates[0]
        return min(candidates, key=attrgetter("computed_tokens"))


def _growth(request: RequestView, block_size: int, granted: int = 0) -> int:
    """Blocks that a request will want soon: those of its prompt that are still to come, and then
    one for each branch that does not end in the block that it is in."""
    length = request.prompt_tokens + request.output_tokens // request.num_branches
    longest = request.prompt_tokens + request.max_tokens - 1
    growth = request.num_branches if (longest - 1) // block_size > (length - 1) // block_size else 0
    if request.is_prefill:
        growth += (request.pending_tokens - granted) // block_size
    return growth
