"""One engine: the real planner and policy, and a model of which only the time is left."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from pageloom.bench.simulate.load import Asked
from pageloom.bench.simulate.meter import Meter
from pageloom.bench.simulate.settings import Settings
from pageloom.contract.costs import StepWork
from pageloom.memory import BlockKey, BlockPool
from pageloom.scheduling import Planner, Request, SamplingParams, StepPlan


class Replica:
    """Steps are planned by `begin` and come to their end by `end`, at the times of the caller's
    clock. In between, requests may be added, which the next step sees."""

    def __init__(self, settings: Settings, meter: Meter) -> None:
        self.now = 0.0
        self.open = 0  # requests that run or wait
        self.max_waiting = settings.max_waiting
        self.meter = meter
        self._costs = settings.costs
        self._plan: StepPlan | None = None
        self.planner = Planner(
            settings.policy.new_scheduler(),
            BlockPool(settings.num_blocks),
            settings.limits,
            policy=settings.policy.name,
            host=BlockPool(settings.host_blocks) if settings.host_blocks else None,
            clock=lambda: self.now,
        )

    @property
    def idle(self) -> bool:
        return self.open == 0

    def holds(self, key: BlockKey) -> bool:
        """Whether a prompt that begins with this block would find it in the cache."""
        return self.planner.pool.find(key) is not None

    def add(self, number: int, asked: Asked, prompt: Sequence[int], tenant: str) -> bool:
        """Queue a request; False if too many wait."""
        if self.max_waiting is not None and len(self.planner.waiting) >= self.max_waiting:
            return False
        self.planner.add(
            Request(
                str(number),
                prompt,
                _params(asked.output_tokens),
                arrival_time=asked.arrival,
                priority=asked.priority,
                user=tenant,
            )
        )
        self.open += 1
        self.meter.waits(tenant)
        return True

    def begin(self, now: float) -> float:
        """Plan a step; returns how many seconds it will take."""
        self.now = now
        plan = self._plan = self.planner.plan()
        work = StepWork.of(
            [chunk.num_tokens for chunk in plan.chunks],
            [chunk.stop for chunk in plan.chunks],
            sum(chunk.draws for chunk in plan.chunks),
        )
        seconds = self._costs.seconds(work)
        self.meter.planned(plan, work, seconds)
        return seconds

    def end(self, now: float) -> None:
        """The step that was begun, if any, is done: its tokens are drawn, and what they end is
        finished."""
        self.now = now
        plan, self._plan = self._plan, None
        if plan is None:
            return
        planner, meter = self.planner, self.meter
        meter.computed(plan)
        for chunk in plan.chunks:
            if not chunk.draws:
                planner.advance(chunk)
                continue
            branch = chunk.branch
            request = branch.request
            planner.advance(chunk, (request.prompt_token_ids[-1],))
            if reason := request.stop_reason_of(branch):
                meter.finished(planner.finish(request, reason))
                self.open -= 1
        planner.complete(plan)


@lru_cache(maxsize=1 << 16)
def _params(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
