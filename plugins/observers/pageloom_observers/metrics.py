"""What is counted, and where each number of a record goes. docs/metrics.md says it to operators.

The names are vLLM's, with the prefix ``pageloom_``, where vLLM has the same metric.
"""

from __future__ import annotations

from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram

from pageloom.contract import EngineInfo, RequestRecord, StepRecord

PREFIX = "pageloom_"

# Of `EngineInfo`, in the labels of ``engine_info``.
_DESCRIBED = (
    "model",
    "architecture",
    "device",
    "dtype",
    "policy",
    "backend",
    "quantizer",
    "block_size",
    "max_model_len",
)

# Seconds. From a step of a small model to a client that has long given up.
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1, 2.5)
LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
TOKENS = tuple(2**power for power in range(18))
REQUESTS = tuple(2**power for power in range(11))


class Metrics:
    """Counters and histograms add up over all engines that report here; gauges are of the one that
    reported last. Safe to call from several threads."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        def counter(name: str, says: str, *labels: str) -> Counter:
            return Counter(PREFIX + name, says, labels, registry=registry)

        def gauge(name: str, says: str, *labels: str) -> Gauge:
            return Gauge(PREFIX + name, says, labels, registry=registry)

        def histogram(name: str, says: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(PREFIX + name, says, buckets=buckets, registry=registry)

        self._engine = gauge("engine_info", "1; the labels describe the engine.", *_DESCRIBED)

        self._running = gauge("num_requests_running", "Requests that hold a seat.")
        self._waiting = gauge("num_requests_waiting", "Requests that wait for a seat.")
        self._usage = gauge("kv_cache_usage_perc", "Share of the KV blocks in use, 0 to 1.")
        self._filled = gauge("kv_slot_usage_perc", "Share of the slots of used blocks filled.")
        self._cached = gauge("kv_blocks_cached", "Free KV blocks with a prefix to be reused.")
        self._blocks = gauge("kv_blocks", "KV blocks that there are.")

        self._steps = counter("steps", "Engine steps.")
        self._prefilled = counter("prefill_tokens", "Prompt tokens computed, again or not.")
        self._decoded = counter("decode_tokens", "Tokens computed by decoding.")
        self._recomputed = counter("recomputed_tokens", "Tokens computed again after preemption.")
        self._preempted = counter("num_preemptions", "Times that a request lost its seat.")
        self._copied = counter("kv_blocks_copied", "KV blocks copied to be written.")
        self._swapped_out = counter("kv_blocks_swapped_out", "KV blocks moved to the host.")
        self._swapped_in = counter("kv_blocks_swapped_in", "KV blocks moved back from it.")
        self._batch = histogram("batch_requests", "Requests that ran in a step.", REQUESTS)
        self._batch_tokens = histogram("iteration_tokens", "Tokens computed in a step.", TOKENS)
        self._step_time = histogram("step_seconds", "Time of a step.", SHORT)

        self._ended = counter("request_finished", "Requests that ended, by how.", "reason")
        self._prompt = counter("prompt_tokens", "Prompt tokens of requests that ended.")
        self._output = counter("generation_tokens", "Output tokens of requests that ended.")
        self._looked_up = counter("prefix_cache_queries", "Prompt tokens looked for in the cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found there.")
        self._prompt_sizes = histogram("request_prompt_tokens", "Prompt tokens each.", TOKENS)
        self._output_sizes = histogram("request_generation_tokens", "Output tokens each.", TOKENS)
        self._queue_time = histogram("request_queue_time_seconds", "Until first scheduled.", LONG)
        self._ttft = histogram("time_to_first_token_seconds", "Until the first token.", LONG)
        self._tpot = histogram(
            "request_time_per_output_token_seconds", "Per output token after the first.", SHORT
        )
        self._e2e = histogram("e2e_request_latency_seconds", "Until the last token.", LONG)

        self._num_running = self._num_waiting = 0
        self._ended_at: list[float] = []  # of requests with a seat, since the last step

    def engine_started(self, info: EngineInfo) -> None:
        described = {name: str(getattr(info, name)) for name in _DESCRIBED}
        described["model"] = info.model.rstrip("/").rpartition("/")[2]  # paths stay here
        self._engine.labels(**described).set(1)
        self._blocks.set(info.num_blocks)

    def step_finished(self, record: StepRecord) -> None:
        in_this_step = sum(when >= record.started for when in self._ended_at)
        self._ended_at.clear()
        self._show_open(max(record.num_running - in_this_step, 0), record.num_waiting)
        if self._num_running or self._num_waiting:
            self._usage.set(record.blocks_used / max(record.blocks_total, 1))
            self._filled.set(record.kv_tokens / max(record.kv_slots, 1))
        self._cached.set(record.blocks_cached)
        self._steps.inc()
        for counter, number in (
            (self._prefilled, record.prefill_tokens),
            (self._decoded, record.decode_tokens),
            (self._recomputed, record.recomputed_tokens),
            (self._preempted, record.preempted),
            (self._copied, record.blocks_copied),
            (self._swapped_out, record.blocks_swapped_out),
            (self._swapped_in, record.blocks_swapped_in),
        ):
            if number:  # most are 0 in most steps, and a step of a small model takes a millisecond
                counter.inc(number)
        self._batch.observe(record.num_running)
        self._batch_tokens.observe(record.prefill_tokens + record.decode_tokens)
        self._step_time.observe(record.finished - record.started)

    def request_finished(self, record: RequestRecord) -> None:
        self._leave(record)
        self._ended.labels(record.finish_reason).inc()
        self._prompt.inc(record.prompt_tokens)
        self._output.inc(record.output_tokens)
        self._prompt_sizes.observe(record.prompt_tokens)
        self._output_sizes.observe(record.output_tokens)
        if record.first_scheduled is not None:
            self._looked_up.inc(record.prompt_tokens)
            self._hits.inc(record.cached_tokens)
            self._queue_time.observe(record.first_scheduled - record.arrived)
        if record.first_token is not None:
            self._ttft.observe(record.first_token - record.arrived)
            if record.output_tokens > 1:
                decoding = record.finished - record.first_token
                self._tpot.observe(decoding / (record.output_tokens - 1))
        if record.finish_reason in ("stop", "length"):
            self._e2e.observe(record.finished - record.arrived)

    def _leave(self, record: RequestRecord) -> None:
        """A step may have been the last for long, so that what is open is kept up between them."""
        seated = record.first_scheduled is not None and self._num_running > 0
        if record.first_scheduled is not None:
            self._ended_at.append(record.finished)
        self._show_open(self._num_running - seated, max(self._num_waiting - (not seated), 0))

    def _show_open(self, running: int, waiting: int) -> None:
        self._num_running, self._num_waiting = running, waiting
        self._running.set(running)
        self._waiting.set(waiting)
        if not running and not waiting:
            self._usage.set(0)
            self._filled.set(0)


METRICS = Metrics()
