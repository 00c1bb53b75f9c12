"""``/metrics`` tells what the engine did, under the names that the documentation lists."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from server_process import PATIENCE

DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"


def samples(server):
    """Values by name, those that differ by their reason together."""
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    found = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if set(sample.labels) <= {"reason"}:
                found[sample.name] += sample.value
    return found


def complete(server, prompt, **fields):
    body = {"model": "tiny", "prompt": prompt, "temperature": 0, "ignore_eos": True, **fields}
    answer = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def counted(server):
    """Send requests; how much each metric grew by them."""
    server.wait_until_idle()
    before = samples(server)

    def counted():
        server.wait_until_idle()
        after = samples(server)
        return {name: value - before.get(name, 0.0) for name, value in after.items()}

    return counted


def test_requests_and_their_tokens_are_counted(server, counted):
    prompt = list(range(100, 164))
    for _ in range(2):
        complete(server, prompt, max_tokens=5, cache_salt="metrics")
    grew = counted()
    assert grew["pageloom_request_finished_total"] == 2
    assert grew["pageloom_prompt_tokens_total"] == grew["pageloom_prefix_cache_queries_total"]
    assert grew["pageloom_prompt_tokens_total"] == 128
    assert grew["pageloom_generation_tokens_total"] == 10
    assert 0 < grew["pageloom_prefix_cache_hits_total"] < 64
    cached = grew["pageloom_prefix_cache_hits_total"]
    assert grew["pageloom_prefill_tokens_total"] == 128 - cached
    assert grew["pageloom_decode_tokens_total"] == 8
    for name in ("time_to_first_token", "request_queue_time", "request_time_per_output_token",
                 "e2e_request_latency"):  # fmt: skip
        assert grew[f"pageloom_{name}_seconds_count"] == 2, name
        assert grew[f"pageloom_{name}_seconds_sum"] > 0, name
    assert grew["pageloom_steps_total"] == grew["pageloom_step_seconds_count"] == 10


def test_an_idle_server_says_so(server):
    complete(server, "idle", max_tokens=2)
    server.wait_until_idle()
    found = samples(server)
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert found[f"pageloom_{name}"] == 0
    assert found["pageloom_kv_blocks"] > 0


def test_http_requests_are_counted_by_endpoint(server):
    def count(**labels):
        text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
        return sum(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "pageloom_http_requests_total" and sample.labels == labels
        )

    good = {"method": "POST", "path": "/v1/completions", "status": "200"}
    bad = good | {"status": "400"}
    lost = {"method": "any", "path": "none", "status": "404"}
    before = count(**good), count(**bad), count(**lost)
    complete(server, "a", max_tokens=1)
    httpx.post(f"{server.url}/v1/completions", content="{", timeout=PATIENCE)
    httpx.get(f"{server.url}/made/up", timeout=PATIENCE)
    httpx.request("DELETE", f"{server.url}/made/up/too", timeout=PATIENCE)
    after = count(**good), count(**bad), count(**lost)
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1, 2]


def test_every_metric_is_documented_and_every_documented_one_is_there(server):
    text = httpx.get(f"{server.url}/metrics", timeout=PATIENCE).text
    served = {
        family.name
        for family in text_string_to_metric_families(text)
        if family.name.startswith("pageloom_") and not family.name.endswith("_created")
    }
    named = set(re.findall(r"^\| `(pageloom_\w+)`", DOCS.read_text(encoding="utf-8"), re.M))
    assert {name.removesuffix("_total") for name in named} == served
