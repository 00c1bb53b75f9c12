"""The plugin ``otel``: an OpenTelemetry trace of each request that ended.

It is on where the SDK and its OTLP exporter are installed (``pageloom[otel]``) and the standard
variable ``OTEL_EXPORTER_OTLP_ENDPOINT`` (or ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT``) says where the
collector is; the SDK reads its other ``OTEL_`` variables too. Otherwise there is no hook here.
"""

from __future__ import annotations

import logging
import os
from importlib.util import find_spec
from typing import TYPE_CHECKING

from pageloom.contract import EngineInfo, RequestRecord, hookimpl

if TYPE_CHECKING:
    from pageloom_observers.spans import Spans

contract_version = "1.0"

log = logging.getLogger(__name__)

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
_NEEDED = ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")


def spans() -> Spans:
    """Of all engines of this process. Imported for the first of them: it takes long."""
    from pageloom_observers.spans import exported

    return exported()


def _is_installed() -> bool:
    try:
        return all(find_spec(name) is not None for name in _NEEDED)
    except ModuleNotFoundError:  # of a part that its parents are not there for
        return False


if not any(map(os.environ.get, _ENDPOINTS)):
    log.debug("there are no traces: %s is not set", _ENDPOINTS[0])
elif not _is_installed():
    log.warning("there are no traces: pip install 'pageloom[otel]', or unset %s", _ENDPOINTS[0])
else:

    @hookimpl
    def engine_started(info: EngineInfo) -> None:
        spans().engine_started(info)

    @hookimpl
    def request_finished(record: RequestRecord) -> None:
        spans().request_finished(record)
