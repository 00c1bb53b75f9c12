"""All that a plugin may import from Pageloom, kept stable across releases.

A plugin is a Python package with an entry point in the group ``pageloom``. The entry point
names a module that states the contract it was written for and implements hooks:

``pyproject.toml``::

    [project.entry-points.pageloom]
    shortest = "pageloom_shortest"

``pageloom_shortest/__init__.py``::

    from pageloom.contract import hookimpl

    contract_version = "1.0"   # a literal: the version you wrote and tested against

    @hookimpl
    def register_schedulers(register):
        register("shortest", "pageloom_shortest.policy:ShortestFirst")

The hooks are in `pageloom.contract.hooks`. Importing this package imports no torch, and the
registered targets are imported only when a configuration picks them.

Versioning: within major version 1 nothing here is removed or changes its meaning. Minor
versions add hooks, optional arguments and methods with a default. A plugin whose major version
differs, or whose minor version is newer than the engine's, is refused by name when it loads.
"""

from pageloom.contract import native
from pageloom.contract.attention import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    LayerSpec,
)
from pageloom.contract.component import Component
from pageloom.contract.executor import (
    Blueprint,
    Executor,
    Step,
    StepOutput,
    Worker,
    WorkerError,
    WorkerReport,
)
from pageloom.contract.hooks import CONTRACT_VERSION, Register, hookimpl
from pageloom.contract.loader import Slice, WeightLoader
from pageloom.contract.observer import EngineInfo, RequestRecord, StepRecord
from pageloom.contract.quantizer import KVQuantizer, VectorLayout
from pageloom.contract.ranks import Alone, Group, Rank
from pageloom.contract.scheduler import (
    PlanView,
    Refusal,
    RequestView,
    Scheduler,
    SchedulerView,
)
from pageloom.contract.tools import CallPiece, ToolParser

__all__ = [
    "CONTRACT_VERSION",
    "Alone",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionSpec",
    "Blueprint",
    "CallPiece",
    "Component",
    "EngineInfo",
    "Executor",
    "Group",
    "KVQuantizer",
    "LayerSpec",
    "PlanView",
    "Rank",
    "Refusal",
    "Register",
    "RequestRecord",
    "RequestView",
    "Scheduler",
    "SchedulerView",
    "Slice",
    "Step",
    "StepOutput",
    "StepRecord",
    "ToolParser",
    "VectorLayout",
    "WeightLoader",
    "Worker",
    "WorkerError",
    "WorkerReport",
    "hookimpl",
    "native",
]
