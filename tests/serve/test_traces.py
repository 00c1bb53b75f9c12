"""What a collector of OpenTelemetry gets from a server."""

from __future__ import annotations

import gzip
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest
from server_process import start_server

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs pageloom[otel]")


@pytest.fixture
def collector(monkeypatch):
    """A collector, which the engine is told of; the requests that it got."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            data = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                data = gzip.decompress(data)
            got.append((self.path, ExportTraceServiceRequest.FromString(data)))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", address)
    yield got
    server.shutdown()
    server.server_close()
    thread.join(60)


def test_a_request_is_traced_and_no_span_is_lost_at_the_end(collector, config):
    with start_server(config) as server:
        for name in ("one", "two"):
            answer = httpx.post(
                f"{server.url}/v1/completions",
                json={"prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True},
                headers={"x-request-id": name},
                timeout=60,
            )
            assert answer.status_code == 200
        assert server.end() == 0  # the SDK gathers spans for seconds, but has sent all by now
    assert {path for path, _ in collector} == {"/v1/traces"}
    resources = [one for _, request in collector for one in request.resource_spans]
    services = {a.value.string_value for one in resources for a in one.resource.attributes
                if a.key == "service.name"}  # fmt: skip
    assert services == {"pageloom"}
    spans = [span for one in resources for scope in one.scope_spans for span in scope.spans]
    assert sorted(span.name for span in spans) == sorted(
        ["llm_request", "queue", "prefill", "decode"] * 2
    )
    ids = [a.value.string_value for span in spans for a in span.attributes
           if a.key == "gen_ai.response.id"]  # fmt: skip
    assert [name.rpartition("-")[0] for name in ids] == ["one", "two"]
