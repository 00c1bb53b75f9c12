"""Which executor runs the model."""

from __future__ import annotations

from pageloom.config import Config, build_options
from pageloom.contract import Blueprint, Executor
from pageloom.errors import PageloomError
from pageloom.plugins import Plugins, blame

KIND = "executor"
AUTO = "auto"


def make_executor(config: Config, plugins: Plugins, blueprint: Blueprint) -> tuple[str, Executor]:
    """The executor that ``parallel.executor`` names, not started, and its name. Raises
    `PageloomError` if it cannot run the blueprint's ranks here."""
    name = config.parallel.executor
    if name == AUTO:
        name = "local" if blueprint.world_size == 1 else "torch_distributed"
    cls: type[Executor] = plugins.get(KIND, name)
    with blame(KIND, name):
        reason = cls.check(blueprint)
        if reason is not None:
            raise PageloomError(f"parallel.executor {name} {reason}")
        return name, cls(build_options(cls, config.parallel.options))


def finds_devices(config: Config) -> bool:
    """See `Executor.finds_devices`."""
    name = config.parallel.executor
    if name == AUTO:
        return False
    executor: type[Executor] = config.loaded_plugins.get(KIND, name)
    return executor.finds_devices
