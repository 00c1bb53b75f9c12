"""The metrics are what the records say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from pageloom.contract import EngineInfo, RequestRecord, StepRecord
from pageloom_observers.metrics import Metrics

STEP = StepRecord(
    step=1, started=10.0, finished=10.5, num_running=3, num_waiting=2, prefill_tokens=40,
    decode_tokens=2, recomputed_tokens=7, preempted=1, blocks_copied=4, blocks_swapped_out=5,
    blocks_swapped_in=6, blocks_used=20, blocks_cached=9, blocks_total=80, kv_tokens=70,
    kv_slots=80,
)  # fmt: skip
REQUEST = RequestRecord(
    request_id="a", user="", finish_reason="length", prompt_tokens=30, cached_tokens=16,
    output_tokens=5, preemptions=0, arrived=9.0, first_scheduled=9.5, first_token=10.0,
    finished=10.4,
)  # fmt: skip
INFO = EngineInfo(
    "/models/secret/tiny/", "Llama", "cpu", "float32", "fcfs", "torch_paged", None, 16, 80, 64, 128
)


class Seen:
    """Metrics of a registry of their own."""

    def __init__(self):
        self._registry = CollectorRegistry()
        self.metrics = Metrics(self._registry)

    def __getitem__(self, name):
        return self._registry.get_sample_value(f"pageloom_{name}")

    def labeled(self, name, **labels):
        return self._registry.get_sample_value(f"pageloom_{name}", labels)


@pytest.fixture
def seen():
    return Seen()


def test_a_step_is_counted(seen):
    seen.metrics.step_finished(STEP)
    seen.metrics.step_finished(STEP)
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (3, 2)
    assert seen["kv_cache_usage_perc"] == 20 / 80
    assert seen["kv_slot_usage_perc"] == 70 / 80
    assert seen["kv_blocks_cached"] == 9
    assert seen["steps_total"] == 2
    assert seen["prefill_tokens_total"] == 80
    assert seen["decode_tokens_total"] == 4
    assert seen["recomputed_tokens_total"] == 14
    assert seen["num_preemptions_total"] == 2
    assert seen["kv_blocks_copied_total"] == 8
    assert seen["kv_blocks_swapped_out_total"] == 10
    assert seen["kv_blocks_swapped_in_total"] == 12
    assert (seen["batch_requests_sum"], seen["batch_requests_count"]) == (6, 2)
    assert seen["iteration_tokens_sum"] == 84
    assert seen["step_seconds_sum"] == pytest.approx(1.0)


def test_a_finished_request_is_counted(seen):
    seen.metrics.request_finished(REQUEST)
    assert seen.labeled("request_finished_total", reason="length") == 1
    assert seen["prompt_tokens_total"] == seen["prefix_cache_queries_total"] == 30
    assert seen["prefix_cache_hits_total"] == 16
    assert seen["generation_tokens_total"] == seen["request_generation_tokens_sum"] == 5
    assert seen["request_queue_time_seconds_sum"] == pytest.approx(0.5)
    assert seen["time_to_first_token_seconds_sum"] == pytest.approx(1.0)
    assert seen["request_time_per_output_token_seconds_sum"] == pytest.approx(0.1)
    assert seen["e2e_request_latency_seconds_sum"] == pytest.approx(1.4)


def test_what_did_not_happen_has_no_time(seen):
    aborted = replace(REQUEST, finish_reason="abort", first_scheduled=None, first_token=None)
    seen.metrics.request_finished(aborted)
    seen.metrics.request_finished(replace(REQUEST, output_tokens=1))
    assert seen.labeled("request_finished_total", reason="abort") == 1
    assert seen["request_queue_time_seconds_count"] == 1
    assert seen["time_to_first_token_seconds_count"] == 1
    assert seen["request_time_per_output_token_seconds_count"] == 0
    assert seen["e2e_request_latency_seconds_count"] == 1
    assert seen["prefix_cache_queries_total"] == 30


def test_who_ended_in_a_step_does_not_run_after_it(seen):
    seen.metrics.request_finished(replace(REQUEST, finished=10.4))
    seen.metrics.step_finished(STEP)
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (2, 2)
    seen.metrics.request_finished(replace(REQUEST, finished=10.6))  # aborted before the next step
    assert seen["num_requests_running"] == 1
    seen.metrics.step_finished(replace(STEP, started=10.7, num_running=1))
    assert seen["num_requests_running"] == 1


def test_an_idle_engine_runs_nothing_and_uses_nothing(seen):
    seen.metrics.step_finished(replace(STEP, num_running=1, num_waiting=2))
    never_run = replace(REQUEST, first_scheduled=None, first_token=None)
    preempted = replace(REQUEST, preemptions=1)  # waits again, though it was scheduled once
    for record in (REQUEST, never_run, preempted):
        seen.metrics.request_finished(replace(record, finish_reason="abort", finished=11.0))
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (0, 0)
    assert (seen["kv_cache_usage_perc"], seen["kv_slot_usage_perc"]) == (0, 0)


def test_the_engine_is_described_without_its_path(seen):
    seen.metrics.engine_started(INFO)
    seen.metrics.engine_started(INFO)  # several engines in one process
    labels = {
        "model": "tiny", "architecture": "Llama", "device": "cpu", "dtype": "float32",
        "policy": "fcfs", "backend": "torch_paged", "quantizer": "None", "block_size": "16",
        "max_model_len": "128",
    }  # fmt: skip
    assert seen.labeled("engine_info", **labels) == 1
    assert seen["kv_blocks"] == 80


def test_without_the_library_nobody_observes():
    script = (
        "import sys; sys.modules['prometheus_client'] = None\n"
        "import importlib.util as util; found = util.find_spec\n"
        "util.find_spec = lambda n, *a: None if n == 'prometheus_client' else found(n, *a)\n"
        "from pageloom.plugins import Plugins\n"
        "plugins = Plugins.load(['prometheus'])\n"
        "assert not plugins.failures, plugins.failures\n"
        "assert not plugins.observes('step_finished')\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=1200)


def test_several_engines_in_one_process_do_not_clash():
    from pageloom.plugins import Plugins

    for _ in range(2):
        plugins = Plugins.load(["prometheus"])
        assert not plugins.failures
        assert plugins.observes("step_finished")
        plugins.notify("engine_started", info=INFO)
        plugins.notify("step_finished", record=STEP)
        assert plugins.observes("step_finished"), "it raised, and is not called again"
