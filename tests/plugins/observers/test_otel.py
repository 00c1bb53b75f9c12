"""A request becomes a span, with its phases in it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

pytest.importorskip("opentelemetry.sdk", reason="pageloom[otel] is not installed")

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pageloom.contract import EngineInfo, RequestRecord
from pageloom_observers.spans import Spans

INFO = EngineInfo(
    "/models/secret/tiny", "Llama", "cpu", "float32", "fcfs", "torch_paged", None, 16, 80, 64, 128
)


@pytest.fixture
def record():
    now = time.monotonic()
    return RequestRecord(
        request_id="mine-0", user="me", finish_reason="length", prompt_tokens=30, cached_tokens=16,
        output_tokens=5, preemptions=1, arrived=now - 4, first_scheduled=now - 3,
        first_token=now - 1, finished=now,
    )  # fmt: skip


@pytest.fixture
def exported():
    """The spans of a record, by name."""

    def exported(record):
        exporter, provider = InMemorySpanExporter(), TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        spans = Spans(provider)
        spans.engine_started(INFO)
        spans.request_finished(record)
        return {span.name: span for span in exporter.get_finished_spans()}

    return exported


def test_a_request_is_a_span_with_its_phases(exported, record):
    spans = exported(record)
    assert set(spans) == {"llm_request", "queue", "prefill", "decode"}
    whole = spans.pop("llm_request")
    seconds = {name: (span.end_time - span.start_time) / 1e9 for name, span in spans.items()}
    assert seconds == pytest.approx({"queue": 1.0, "prefill": 2.0, "decode": 1.0}, abs=1e-6)
    assert spans["queue"].start_time == whole.start_time
    assert spans["decode"].end_time == whole.end_time
    assert abs(whole.end_time / 1e9 - time.time()) < 60, "the clock of the day"
    for span in spans.values():
        assert span.parent.span_id == whole.context.span_id
        assert span.context.trace_id == whole.context.trace_id
    told = {
        "gen_ai.request.model": "tiny", "gen_ai.response.id": "mine-0",
        "gen_ai.response.finish_reasons": ("length",), "gen_ai.usage.input_tokens": 30,
        "gen_ai.usage.cache_read.input_tokens": 16, "gen_ai.usage.output_tokens": 5,
        "pageloom.preemptions": 1, "pageloom.user": "me",
    }  # fmt: skip
    assert {name: whole.attributes[name] for name in told} == told
    assert whole.status.is_unset


def test_what_did_not_begin_has_no_span(exported, record):
    waited = replace(record, first_scheduled=None, first_token=None, finish_reason="error")
    spans = exported(waited)
    assert set(spans) == {"llm_request", "queue"}
    assert spans["queue"].end_time == spans["llm_request"].end_time
    assert not spans["llm_request"].status.is_ok
    assert not spans["llm_request"].status.is_unset


@pytest.mark.parametrize("endpoint", ["", "http://127.0.0.1:9"])
def test_it_observes_only_where_there_is_a_collector(endpoint):
    script = (
        "from pageloom.plugins import Plugins\n"
        "plugins = Plugins.load(['otel'])\n"
        "assert not plugins.failures, plugins.failures\n"
        "print(plugins.observes('request_finished'))\n"
    )
    variables = os.environ | {"OTEL_EXPORTER_OTLP_ENDPOINT": endpoint}
    result = subprocess.run(
        [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=1200
    )
    assert result.stdout.strip() == str(bool(endpoint)), result.stderr
