"""The model in the engine's own process."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from pageloom.contract import (
    Alone,
    Blueprint,
    Executor,
    Step,
    StepOutput,
    Worker,
    WorkerError,
    WorkerReport,
)


class LocalExecutor(Executor):
    """One rank, to which steps are handed as they are."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._outputs: deque[StepOutput] = deque()

    @classmethod
    def check(cls, blueprint: Blueprint) -> str | None:
        if blueprint.world_size > 1:
            return f"runs one rank only, not {blueprint.world_size}"
        return None

    def start(self, blueprint: Blueprint) -> Sequence[WorkerReport]:
        self.worker = blueprint.build(Alone())
        return [self.worker.report()]

    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        self._running().allocate(num_blocks, host_blocks)

    def submit(self, step: Step) -> None:
        output = self._running().run(step)
        if output is None:
            raise WorkerError("the only worker gave no output")
        self._outputs.append(output)

    def receive(self) -> StepOutput:
        return self._outputs.popleft()

    def close(self) -> None:
        self.worker = None

    def _running(self) -> Worker:
        if self.worker is None:
            raise WorkerError("the executor is closed")
        return self.worker
