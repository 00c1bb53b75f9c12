"""The hooks. Registering hooks run once, at load; observers run while the engine works.

An implementation may take any subset of a hook's arguments, so that arguments added in a later
minor version never break it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from pageloom.contract.observer import EngineInfo, RequestRecord, StepRecord

CONTRACT_VERSION = "1.2"

hookspec = pluggy.HookspecMarker("pageloom")
hookimpl = pluggy.HookimplMarker("pageloom")


class Register(Protocol):
    def __call__(self, name: str, target: str) -> None:
        """Offer a component under ``name``, the word that YAML picks it by.

        ``target`` is ``"package.module:Class"``. It is not imported until a configuration picks
        ``name``, or leaves the choice open (``auto``), or ``pageloom plugins`` asks whether it can
        run here.

        Raises `ValueError` when ``target`` has another form, and a clash error that names both
        packages when ``name`` is taken.
        """


# Registering hooks, called once in no promised order when plugins are loaded.


@hookspec
def register_schedulers(register: Register) -> None:
    """Register `Scheduler` classes, picked by ``scheduler.policy``. New in 1.0."""


@hookspec
def register_attention_backends(register: Register) -> None:
    """Register `AttentionBackend` classes, picked by ``attention.backend``. New in 1.0."""


@hookspec
def register_kv_quantizers(register: Register) -> None:
    """Register `KVQuantizer` classes, picked by ``kv_cache.quantizer``. New in 1.0."""


@hookspec
def register_weight_loaders(register: Register) -> None:
    """Register `WeightLoader` classes, picked by ``model.loader`` or by `detect`. New in 1.0."""


@hookspec
def register_tool_parsers(register: Register) -> None:
    """Register `ToolParser` classes, picked by ``server.tool_parser`` or `detect`. New in 1.1."""


@hookspec
def register_executors(register: Register) -> None:
    """Register `Executor` classes, picked by ``parallel.executor``. New in 1.2."""


# Observers, called in the engine's thread. They must return quickly and must not raise: an
# exception is logged with the plugin's name and the observer is not called again.


@hookspec
def engine_started(info: EngineInfo) -> None:
    """The engine is assembled and ready for requests. Called once per engine. New in 1.0."""


@hookspec
def step_finished(record: StepRecord) -> None:
    """One engine step is done, its tokens are appended and streamed. New in 1.0."""


@hookspec
def request_finished(record: RequestRecord) -> None:
    """A request ended, by stop, length, abort or error; its blocks are free. New in 1.0."""
