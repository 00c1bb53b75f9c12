"""What the web process counts of HTTP. The engine process has its own; ``/metrics`` shows both."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from starlette.types import Scope

# Seconds; a stream lasts as long as its request does.
BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 5, 10, 30, 60, 120, 300, 600)

# Of their own: in the default registry are metrics of the process, as in that of the engine's.
_registry = CollectorRegistry()
_LABELS = ("method", "path", "status")
_requests = Counter("pageloom_http_requests", "Requests.", _LABELS, registry=_registry)
_seconds = Histogram(
    "pageloom_http_request_seconds",
    "Until the answer was sent.",
    ("method", "path"),
    buckets=BUCKETS,
    registry=_registry,
)


def count(scope: Scope, status: int, seconds: float) -> None:
    """Count a request that was served; status 0 is one that got no answer."""
    # The path of the endpoint: what clients make up must not become labels without end.
    path = getattr(scope.get("route"), "path", "none")
    method = scope["method"] if path != "none" else "any"
    _requests.labels(method, path, str(status)).inc()
    _seconds.labels(method, path).observe(seconds)


def exposition() -> bytes:
    """In the text format of Prometheus."""
    return generate_latest(_registry)
