"""A process per rank on this machine, which reach each other by `torch.distributed`."""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pageloom.contract import Blueprint, Executor, Step, StepOutput, WorkerError, WorkerReport
from pageloom_executors.crew import Crew
from pageloom_executors.processes import Launch, RankProcess, bury
from pageloom_executors.wire import LOAD_SECONDS, Allocate, Run, Start, pack

PATIENCE = 3.0  # seconds for ranks of which none is lost to end


class TorchDistributedExecutor(Executor):
    """Ranks are processes of the same Python with the same packages. On CPUs they talk by gloo
    over the loopback interface, on GPUs (one for each rank) by NCCL.

    They end with the engine's process, however it ends. A rank that dies is known at once by the
    end of its connection; one that hangs, by the steps that do not end, and that it does not
    answer when it is asked.
    """

    @dataclass
    class Config:
        load_seconds: float = LOAD_SECONDS
        """How long no rank may get ready while the model is loaded, before they count as hung."""

        def __post_init__(self) -> None:
            if not self.load_seconds > 0:
                raise ValueError(f"load_seconds must be above 0, not {self.load_seconds:g}")

    config: Config

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._crew = Crew([], 0)
        self._launch: Launch | None = None
        self._blueprint: Blueprint | None = None

    @classmethod
    def check(cls, blueprint: Blueprint) -> str | None:
        import torch
        import torch.distributed as dist

        from pageloom_executors.group import BACKENDS

        if os.name != "posix":
            return f"runs on Linux and macOS, not on {sys.platform}"
        if not dist.is_available():
            return f"needs torch.distributed, which torch {torch.__version__} comes without"
        device = torch.device(blueprint.device)
        if (backend := BACKENDS.get(device.type)) is None:
            return f"runs ranks on {' or '.join(BACKENDS)} devices, not on {device.type}"
        if not dist.is_backend_available(backend):
            return f"needs {backend}, which torch {torch.__version__} comes without"
        if device.type == "cuda":
            last, there = (device.index or 0) + blueprint.world_size, torch.cuda.device_count()
            if last > there:
                return f"needs a GPU for each rank, up to cuda:{last - 1}, but there are {there}"
        return None

    def start(self, blueprint: Blueprint) -> Sequence[WorkerReport]:
        self._blueprint = blueprint
        self.max_in_flight = blueprint.pipeline_parallel_size
        ranks = [RankProcess(blueprint.rank(index)) for index in range(blueprint.world_size)]
        self._crew = Crew(ranks, blueprint.timeout_seconds)
        store = socket.create_server(("127.0.0.1", 0))
        port = store.getsockname()[1]
        self._launch = Launch(ranks, _environment(blueprint), store)
        try:
            self._launch.wait()
        except OSError as error:
            raise WorkerError(f"the process of a rank cannot be started: {error}") from error
        text, path, levels = blueprint.dump(), _search_path(), _log_levels()
        for each in ranks:
            each.ask(pack(Start(text, each.rank.index, port, path, levels)))
        self._wait_for_all(lambda each: each.report is not None)
        return [each.report for each in ranks if each.report]

    def allocate(self, num_blocks: int, host_blocks: int) -> None:
        _, crew = self._started()
        crew.send(Allocate(num_blocks, host_blocks))
        self._wait_for_all(lambda each: each.allocated)

    def submit(self, step: Step) -> None:
        blueprint, crew = self._started()
        crew.send(Run(blueprint.pack(step)))

    def receive(self) -> StepOutput:
        blueprint, crew = self._started()
        return blueprint.unpack(crew.wait_for_step())

    def check_workers(self) -> None:
        self._started()[1].check()

    def close(self) -> None:
        if self._launch is not None:
            with suppress(OSError):  # which `start` has raised
                self._launch.wait()
        bury(self._crew.ranks, PATIENCE if self._crew.is_sound else 0)
        self._crew, self._launch, self._blueprint = Crew([], 0), None, None

    def _wait_for_all(self, ready: Callable[[RankProcess], bool]) -> None:
        crew, limit = self._crew, self.config.load_seconds
        crew.wait(
            lambda: all(map(ready, crew.ranks)),
            f"no rank has become ready for {limit:g} seconds (parallel.options.load_seconds)",
            limit,
        )

    def _started(self) -> tuple[Blueprint, Crew]:
        if self._blueprint is None:
            raise WorkerError("the executor is closed")
        return self._blueprint, self._crew


def _environment(blueprint: Blueprint) -> dict[str, str]:
    """That of this process, and what ranks on one machine need unless it says otherwise."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    share = max(1, _num_cores() // blueprint.world_size)
    defaults = {
        "GLOO_SOCKET_IFNAME": names[0] if names else "",
        # With more threads than cores, ranks that spin keep those from the cores that they wait for
        "OMP_NUM_THREADS": str(blueprint.num_threads or share),
    }
    return {name: value for name, value in defaults.items() if value} | os.environ


def _num_cores() -> int:
    """Those that this process may use, where the system tells."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _search_path() -> list[str]:
    """For modules, as this process has it: the empty entry is the current folder."""
    return [os.path.abspath(entry) for entry in sys.path]


def _log_levels() -> dict[str, int]:
    """Of the loggers that were given one; the root is ``""``."""
    named = {
        name: logger.level
        for name, logger in logging.root.manager.loggerDict.items()
        if isinstance(logger, logging.Logger) and logger.level
    }
    return {"": logging.root.level} | named
