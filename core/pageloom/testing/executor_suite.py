"""What every executor must do, as a pytest suite to inherit.

For a package that has the executor of `pageloom.contract.executor`'s example, two files more.
``pyproject.toml``::

    [project.optional-dependencies]
    test = ["pageloom[testing]", "pytest-timeout"]

``test_apart.py``::

    from pageloom.testing import ExecutorSuite
    from pageloom_apart import Apart

    class TestApart(ExecutorSuite):
        sizes = [(1, 1)]

        def executor(self):
            return Apart(Apart.Config())

Then ``pytest -rs --timeout 60``, with pytest-timeout, since an executor may hang.
"""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest

from pageloom.contract import Executor, WorkerError, WorkerReport
from pageloom.testing.executor_model import (
    HOST_BLOCKS,
    NUM_BLOCKS,
    SENTENCE,
    TROUBLES,
    SumBlueprint,
    SumStep,
    Trouble,
)

PATIENCE = 60.0  # seconds for processes to be gone, on a busy machine


@dataclass
class Running:
    """An executor whose workers have their caches."""

    executor: Executor
    blueprint: SumBlueprint
    reports: Sequence[WorkerReport]
    num_steps: int = 0

    @property
    def pids(self) -> list[int]:
        return [report.weights["pid"] for report in self.reports]

    def check(self, *steps: SumStep) -> None:
        """Submit all of them, and then compare what comes back."""
        for step in steps:
            self.executor.submit(step)
        for step in steps:
            self.num_steps += 1
            expected = step.expected(
                self.num_steps,
                self.blueprint.tensor_parallel_size,
                self.blueprint.pipeline_parallel_size,
            )
            assert self.executor.receive().token_ids == expected

    def lose(self, kind: str, rank: int) -> str:
        """Run a step in which that rank gets into trouble; what the executor says of it."""
        try:
            self.executor.submit(SumStep([1], trouble=Trouble(kind, rank)))
            self.executor.receive()
        except WorkerError as error:
            return str(error)
        pytest.fail(f"the step ends although rank {rank} {TROUBLES[kind]}")


class ExecutorSuite(ABC):
    """Inherit it in a class named ``Test...`` and say how the executor is made.

    The model adds up numbers (`pageloom.testing.executor_model`). Tests of workers that get lost
    are skipped for an executor whose worker is in the engine's process, and that is lost with it.
    Most tests run the first of `sizes` that has several ranks.
    """

    sizes: ClassVar[Sequence[tuple[int, int]]] = [(1, 1), (2, 1), (1, 2), (2, 2)]
    """Tensor ranks and stages that it can run on the machine of the tests."""

    too_large: ClassVar[tuple[int, int] | None] = None
    """Sizes that it cannot run anywhere, if there are any."""

    device: ClassVar[str] = "cpu"

    _in_process: ClassVar[bool | None] = None

    @abstractmethod
    def executor(self) -> Executor:
        """A new instance, with the options to be tested. Called several times in a test."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        if "size" in metafunc.fixturenames:
            names = [f"{tensor}x{stages}" for tensor, stages in self.sizes]
            metafunc.parametrize("size", self.sizes, ids=names)

    def test_says_what_it_can_run(self) -> None:
        for tensor, stages in self.sizes:
            blueprint = SumBlueprint(tensor, stages, device=self.device)
            assert type(self.executor()).check(blueprint) is None
        if self.too_large:
            refusal = type(self.executor()).check(SumBlueprint(*self.too_large, device=self.device))
            assert refusal

    def test_computes_steps(self, size: tuple[int, int]) -> None:
        """With as many under way as it takes, of any length, empty ones too; the outputs come in
        the order of the steps, the reports and caches are those of every rank, and the clock never
        goes back."""
        with self.running(*size) as running:
            ranks = [running.blueprint.rank(index) for index in range(len(running.reports))]
            assert [report.architecture for report in running.reports] == [str(r) for r in ranks]
            found = [report.num_blocks for report in running.reports]
            assert found == [NUM_BLOCKS + rank.index for rank in ranks]
            running.check(SumStep([5]))
            in_flight = running.executor.max_in_flight
            assert in_flight >= 1
            for length in (1, 0, 100, 20_000):
                running.check(*[SumStep(range(n, n + length)) for n in range(in_flight)])
            running.check(*[SumStep([n], padding="long" * 1_000_000) for n in range(in_flight)])
            times = []
            for number in range(30):
                times.append(running.executor.clock())
                running.executor.check_workers()
                running.check(SumStep([number, 3]))
            assert times == sorted(times)

    def test_leaves_nothing_behind(self) -> None:
        """When it is closed, were it twice, and it can be made again."""
        for _ in range(2):
            with self.running(*self.size) as running:
                running.check(SumStep([1]))
            running.executor.close()
            assert running.executor.worker is None
            with pytest.raises(WorkerError):
                running.executor.submit(SumStep([1]))

    def test_can_be_closed_before_it_starts(self) -> None:
        self.executor().close()

    def test_says_why_a_model_cannot_be_loaded(self) -> None:
        """In the worker's own words, whichever rank it is."""
        assert self.fails_to_start(ValueError, "refuses") == SENTENCE

    def test_says_why_a_cache_cannot_be_made(self) -> None:
        executor = self.executor()
        try:
            executor.start(SumBlueprint(*self.size, device=self.device))
            with pytest.raises(ValueError, match=f"host_blocks is 1, not {HOST_BLOCKS}"):
                executor.allocate(NUM_BLOCKS, 1)
        finally:
            executor.close()

    def test_names_a_rank_that_dies_while_it_loads(self) -> None:
        self.needs_processes()
        assert f"rank {self.last_rank}" in self.fails_to_start(WorkerError, "dies")

    @pytest.mark.parametrize("kind", ["dies", "raises", "stops", "sleeps"])
    def test_names_the_rank_that_is_lost(self, kind: str) -> None:
        """In a step, whether its process dies, its worker raises, or it does nothing for longer
        than it may. No call hangs or succeeds afterwards, and all processes can be ended."""
        self.needs_processes()
        rank = self.last_rank
        patience = 2.0 if kind in ("stops", "sleeps") else 120.0
        with self.running(*self.size, timeout_seconds=patience) as running:
            message = running.lose(kind, rank)
            assert f"rank {rank}" in message
            assert "\n" not in message
            if kind == "raises":
                assert "something is wrong here" in message
            for call in (running.executor.check_workers, running.executor.receive):
                with pytest.raises(WorkerError):
                    call()
            with pytest.raises(WorkerError):
                running.executor.submit(SumStep([1]))

    def test_knows_of_a_rank_that_dies_while_there_is_nothing_to_do(self) -> None:
        self.needs_processes()
        with self.running(*self.size) as running:
            running.check(SumStep([1]))
            os.kill(running.pids[-1], 9)
            with pytest.raises(WorkerError, match=f"rank {self.last_rank}"):
                _repeat(running.executor.check_workers)

    # -- for the tests above ----------------------------------------------------------------

    @contextmanager
    def running(self, tensor: int, stages: int, **blueprint: Any) -> Iterator[Running]:
        """Started, and closed on the way out; then no process of it is left."""
        made = SumBlueprint(tensor, stages, device=self.device, **blueprint)
        executor = self.executor()
        pids: list[int] = []
        try:
            reports = executor.start(made)
            running = Running(executor, made, reports)
            pids = [pid for pid in running.pids if pid != os.getpid()]
            executor.allocate(NUM_BLOCKS, HOST_BLOCKS)
            yield running
        finally:
            executor.close()
            _wait_for_end(pids)

    def fails_to_start(self, error: type[Exception], kind: str) -> str:
        """The message of what `Executor.start` raises when the last rank gets into trouble."""
        executor = self.executor()
        trouble = {"kind": kind, "rank": self.last_rank}
        blueprint = SumBlueprint(*self.size, device=self.device, trouble=trouble)
        try:
            with pytest.raises(error) as caught:
                executor.start(blueprint)
        finally:
            executor.close()
        return str(caught.value)

    @property
    def size(self) -> tuple[int, int]:
        return next((each for each in self.sizes if each != (1, 1)), (1, 1))

    @property
    def last_rank(self) -> int:
        return self.size[0] * self.size[1] - 1

    def needs_processes(self) -> None:
        if self._in_process is None:
            with self.running(*self.sizes[0]) as running:
                type(self)._in_process = running.executor.worker is not None
        if self._in_process:
            pytest.skip("its worker is in the engine's process")


def _repeat(call: Callable[[], None]) -> None:
    """Until it raises, or for a minute."""
    deadline = time.monotonic() + PATIENCE
    while time.monotonic() < deadline:
        call()
        time.sleep(0.1)


def _wait_for_end(pids: Sequence[int]) -> None:
    """Fails if one of these processes is there for long, even as a zombie."""
    deadline = time.monotonic() + PATIENCE
    while left := [pid for pid in pids if _exists(pid)]:
        assert time.monotonic() < deadline, f"processes are left behind: {left}"
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
