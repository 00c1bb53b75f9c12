"""From plan to results: as many steps under way as the executor takes."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

from pageloom.contract import Executor, StepRecord, WorkerError
from pageloom.engine.planned import ChunkResult, PlannedStep
from pageloom.plugins import Plugins
from pageloom.scheduling import Planner, StepPlan


@dataclass(slots=True, eq=False)
class RunningStep:
    """A step from its plan until the engine has taken in what came of it."""

    planned: PlannedStep
    occupied: dict[str, int] | None  # see `Stepper._occupied`
    started: float
    received: bool = False
    results: list[ChunkResult] = field(default_factory=list)


class Stepper:
    """Plans steps, has them computed in that order, and tells observers."""

    def __init__(
        self, planner: Planner, executor: Executor, plugins: Plugins, block_size: int
    ) -> None:
        self._planner = planner
        self._executor = executor
        self._plugins = plugins
        self._block_size = block_size
        self._in_flight: deque[RunningStep] = deque()
        self._steps = 0
        self._preempted = 0  # by plans of which nobody was told yet

    def run(self) -> RunningStep:
        """Submit what may be submitted, and wait for the oldest step, which is then to be
        `complete`. If there is nothing to compute, that is a step without results."""
        if self._in_flight:
            self._come_first(self._in_flight[0])
        while len(self._in_flight) < self._executor.max_in_flight:
            step = self._plan()
            if step.planned.is_empty:
                self._planner.complete(step.planned.plan)
                if self._in_flight:
                    self._preempted += len(step.planned.plan.preempted)
                    break
                return step
            try:
                self._executor.submit(step.planned.step)
            except BaseException:
                self._planner.complete(step.planned.plan)
                raise
            self._in_flight.append(step)
        step = self._in_flight[0]
        output = self._executor.receive()
        step.received = True
        step.results = step.planned.results(output)
        return step

    def complete(self, step: RunningStep) -> None:
        """Its results are taken in."""
        if self._in_flight and self._in_flight[0] is step:
            self._in_flight.popleft()
            self._planner.complete(step.planned.plan)
        self._observe(step)

    def give_up(self, error: BaseException) -> None:
        """Nobody waits for the steps in flight any more, because of ``error``. What comes of them
        must not be taken for what comes of later ones."""
        while self._in_flight:
            step = self._in_flight.popleft()
            self._planner.complete(step.planned.plan)
            if not step.received and not isinstance(error, WorkerError):
                with suppress(WorkerError):  # which the next step meets again
                    self._executor.receive()

    def _plan(self) -> RunningStep:
        started = self._planner.clock()
        plan = self._planner.plan()
        try:
            return RunningStep(PlannedStep(plan), self._occupied(plan), started)
        except BaseException:
            self._planner.complete(plan)
            raise

    def _come_first(self, step: RunningStep) -> None:
        """The step before it is complete: from here on its own time counts, and whoever has ended
        meanwhile is not of it."""
        step.started = self._planner.clock()
        step.occupied = self._occupied(step.planned.plan)

    def _occupied(self, plan: StepPlan) -> dict[str, int] | None:
        """How full the cache is while the step runs: before those that finish in it are freed."""
        if not self._plugins.observes("step_finished"):
            return None
        planner = self._planner
        return {
            "num_running": len(planner.running),
            "num_waiting": len(planner.waiting),
            "blocks_used": planner.pool.num_used,
            "blocks_cached": planner.pool.num_cached,
            "kv_tokens": planner.kv_tokens(plan),
            "kv_slots": planner.pool.num_used * self._block_size,
        }

    def _observe(self, step: RunningStep) -> None:
        self._steps += 1
        if step.occupied is None:
            return
        plan = step.planned.plan
        decodes = sum(chunk.is_decode for chunk in plan.chunks)
        record = StepRecord(
            step=self._steps,
            started=step.started,
            finished=self._planner.clock(),
            prefill_tokens=plan.num_tokens - decodes,
            decode_tokens=decodes,
            recomputed_tokens=sum(chunk.num_recomputed for chunk in plan.chunks),
            preempted=len(plan.preempted) + self._preempted,
            blocks_copied=len(plan.copies),
            blocks_swapped_out=len(plan.swapped_out),
            blocks_swapped_in=len(plan.swapped_in),
            blocks_total=self._planner.pool.num_blocks,
            **step.occupied,
        )
        self._preempted = 0
        self._plugins.notify("step_finished", record=record)
