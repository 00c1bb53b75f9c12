"""The scheduling policy that a configuration picks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pageloom.config import Config, build_options
from pageloom.contract import Scheduler
from pageloom.plugins import blame


@dataclass(frozen=True, slots=True)
class Policy:
    """A scheduler that can be made, as often as there are engines."""

    name: str
    scheduler: type[Scheduler]
    options: Any  # an instance of the scheduler's `Config`

    @classmethod
    def of(cls, config: Config) -> Policy:
        """Raises `PageloomError` if it cannot be imported, or its options are wrong."""
        name = config.scheduler.policy
        scheduler: type[Scheduler] = config.loaded_plugins.get("scheduler", name)
        return cls(name, scheduler, build_options(scheduler, config.scheduler.options))

    def new_scheduler(self) -> Scheduler:
        with blame("scheduler", self.name):
            return self.scheduler(self.options)
