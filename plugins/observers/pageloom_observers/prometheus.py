"""The plugin ``prometheus``: metrics of this process's engines, in the registry that
``prometheus_client`` exposes by default. `pageloom_observers.metrics` has them all.

Without ``prometheus_client`` there are no hooks here, so that no engine gathers what nobody reads.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pageloom.contract import EngineInfo, RequestRecord, StepRecord, hookimpl

if TYPE_CHECKING:
    from pageloom_observers.metrics import Metrics

contract_version = "1.0"


def metrics() -> Metrics:
    """Of all engines of this process, as a registry takes a name only once. Imported for the first
    of them: that takes a tenth of a second, for which ``pageloom plugins`` need not wait."""
    from pageloom_observers.metrics import METRICS

    return METRICS


if find_spec("prometheus_client") is None:
    logging.getLogger(__name__).debug("there are no metrics: prometheus_client is not installed")
else:

    @hookimpl
    def engine_started(info: EngineInfo) -> None:
        metrics().engine_started(info)

    @hookimpl
    def step_finished(record: StepRecord) -> None:
        metrics().step_finished(record)

    @hookimpl
    def request_finished(record: RequestRecord) -> None:
        metrics().request_finished(record)
