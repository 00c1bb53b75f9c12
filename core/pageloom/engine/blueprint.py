"""How an engine's workers are made, wherever its executor wants them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, cast

from pageloom.config import Config
from pageloom.contract import Blueprint, Group, StepOutput, Worker
from pageloom.contract import Step as StepView
from pageloom.engine.device import find_device
from pageloom.engine.executor_choice import finds_devices
from pageloom.engine.load_model import ModelSource
from pageloom.errors import PageloomError
from pageloom.runner.step import Step
from pageloom.runner.wire import pack_step, unpack_output

# Of no use to a worker, and not everybody's to read.
LEFT_OUT = ("server",)


class EngineBlueprint(Blueprint):
    """Everything that workers need to know is the configuration."""

    def __init__(
        self, config: Mapping[str, Any] | Config, source: ModelSource | None = None
    ) -> None:
        """``source`` is the model if it is open already, for a worker in this process."""
        self.config = config if isinstance(config, Config) else Config.of_values(config)
        self._source = source
        parallel = self.config.parallel
        self.tensor_parallel_size = parallel.tensor_parallel_size
        self.pipeline_parallel_size = parallel.pipeline_parallel_size
        self.timeout_seconds = parallel.timeout_seconds
        self.device = self._device()
        self.num_threads = self.config.runtime.num_threads

    def build(self, group: Group, device: str | None = None) -> Worker:
        from pageloom.engine.worker import EngineWorker  # imports all that computes

        try:
            return EngineWorker(self.config, group, device or self.device, self._source)
        except PageloomError as error:
            raise ValueError(str(error)) from error

    def _device(self) -> str:
        wanted = self.config.runtime.device
        if wanted.startswith("cuda") and (self.world_size > 1 or finds_devices(self.config)):
            return "cuda"  # one each, possibly on machines other than this one
        return str(find_device(wanted, "runtime.device"))

    def pack(self, step: StepView) -> bytes:
        return pack_step(cast("Step", step))

    def unpack(self, output: bytes) -> StepOutput:
        return unpack_output(output)

    def state(self) -> dict[str, Any]:
        values = asdict(self.config)
        return {"config": {name: values[name] for name in values if name not in LEFT_OUT}}
