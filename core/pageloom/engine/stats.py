"""What a run of the engine came to: an observer that adds up."""

from __future__ import annotations

from statistics import mean

from pageloom.contract import RequestRecord, StepRecord, hookimpl


class EngineStats:
    """Register with `Plugins.register_observer`; read at any time. Times are in seconds."""

    def __init__(self) -> None:
        self.requests: list[RequestRecord] = []
        self.steps = 0
        self.preemptions = 0
        self.computed_tokens = 0  # prefill and decode, each as often as it was computed
        self.recomputed_tokens = 0  # those of them that a preemption had dropped
        self.peak_blocks = 0
        self.peak_running = 0
        self.busy = 0.0  # time spent in steps
        self._running_time = 0.0  # running requests, times how long
        self._held = 0  # token states and slots in use, summed over steps
        self._reserved = 0

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        took = record.finished - record.started
        self.steps += 1
        self.preemptions += record.preempted
        self.computed_tokens += record.prefill_tokens + record.decode_tokens
        self.recomputed_tokens += record.recomputed_tokens
        self.peak_blocks = max(self.peak_blocks, record.blocks_used)
        self.peak_running = max(self.peak_running, record.num_running)
        self.busy += took
        self._running_time += record.num_running * took
        self._held += record.kv_tokens
        self._reserved += record.kv_slots

    @hookimpl
    def request_finished(self, record: RequestRecord) -> None:
        self.requests.append(record)

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(request.prompt_tokens for request in self.requests)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were served from the prefix cache."""
        return sum(request.cached_tokens for request in self.requests)

    @property
    def tokens_per_second(self) -> float:
        """Output tokens of finished requests per second that the engine was stepping."""
        return self.output_tokens / self.busy if self.busy else 0.0

    @property
    def mean_ttft(self) -> float | None:
        """Mean time from arrival to first token."""
        times = [r.first_token - r.arrived for r in self.requests if r.first_token is not None]
        return mean(times) if times else None

    @property
    def mean_running(self) -> float | None:
        """Mean number of running requests over the time that the engine was stepping."""
        return self._running_time / self.busy if self.busy else None

    @property
    def kv_utilization(self) -> float | None:
        """Share of the slots of used blocks that hold a token's state, over all steps."""
        return self._held / self._reserved if self._reserved else None

    @property
    def recomputed_share(self) -> float | None:
        """Share of the computed tokens that had been computed before, until a preemption."""
        return self.recomputed_tokens / self.computed_tokens if self.computed_tokens else None

    @property
    def cached_share(self) -> float | None:
        """Share of the prompt tokens of finished requests that the prefix cache served."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else None
