"""A request as spans: one of the whole, and in it one each of queue, prefill and decode.

The attributes are those of OpenTelemetry's semantic conventions for generative AI, where these have
the same, and else begin with ``pageloom.``.
"""

from __future__ import annotations

import time
from functools import cache

from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

from pageloom.contract import EngineInfo, RequestRecord


class Spans:
    """Makes the spans when a request has ended, from the times in its record."""

    def __init__(self, provider: TracerProvider) -> None:
        self._tracer = provider.get_tracer("pageloom")
        self._model = ""

    def engine_started(self, info: EngineInfo) -> None:
        self._model = info.model.rstrip("/").rpartition("/")[2]  # paths stay here

    def request_finished(self, record: RequestRecord) -> None:
        # Records are on the monotonic clock, spans on that of the day.
        shift = time.time_ns() - time.monotonic_ns()

        def ns(seconds: float) -> int:
            return round(seconds * 1e9) + shift

        whole = self._tracer.start_span(
            "llm_request",
            kind=SpanKind.SERVER,
            start_time=ns(record.arrived),
            attributes={
                "gen_ai.operation.name": "text_completion",
                "gen_ai.provider.name": "pageloom",
                "gen_ai.request.model": self._model,
                "gen_ai.response.id": record.request_id,
                "gen_ai.response.finish_reasons": [record.finish_reason],
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.cache_read.input_tokens": record.cached_tokens,
                "gen_ai.usage.output_tokens": record.output_tokens,
                "pageloom.preemptions": record.preemptions,
                "pageloom.user": record.user,
            },
        )
        if record.finish_reason == "error":
            whole.set_status(Status(StatusCode.ERROR))
        for name, start, end in _phases(record):
            phase = self._tracer.start_span(name, set_span_in_context(whole), start_time=ns(start))
            phase.end(ns(end))
        whole.end(ns(record.finished))


def _phases(record: RequestRecord) -> list[tuple[str, float, float]]:
    """Name, start and end of what the request went through; the last ends with it."""
    begun = [("queue", record.arrived)]
    if record.first_scheduled is not None:
        begun.append(("prefill", record.first_scheduled))
    if record.first_token is not None:
        begun.append(("decode", record.first_token))
    ends = [*(start for _, start in begun[1:]), record.finished]
    return [(name, start, end) for (name, start), end in zip(begun, ends, strict=True)]


@cache
def exported() -> Spans:
    """Spans that go to the collector in batches, from a thread of the SDK's, and when the process
    ends."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

    # What ``OTEL_SERVICE_NAME`` or ``OTEL_RESOURCE_ATTRIBUTES`` say comes before the default.
    named = Resource({SERVICE_NAME: "pageloom"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=named)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)
