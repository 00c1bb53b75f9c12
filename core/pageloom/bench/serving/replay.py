"""Send a trace to an engine in real time, and take down what becomes of each request."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from pageloom.bench.serving.trace import Trace, TraceRequest
from pageloom.contract import RequestRecord, StepRecord, hookimpl
from pageloom.engine.engine import Engine
from pageloom.engine.open_request import OpenRequest
from pageloom.engine.outputs import CompletionChunk
from pageloom.engine.stats import EngineStats
from pageloom.errors import PageloomError
from pageloom.scheduling import SamplingParams


@dataclass(frozen=True, slots=True)
class ServedRequest:
    """One request of a replay. Times are seconds from the start of the replay."""

    prompt_tokens: int
    cached_tokens: int  # prompt tokens served from the prefix cache
    output_tokens: int
    preemptions: int
    arrival: float  # when the trace said it comes, even if a step was under way then
    first_scheduled: float
    first_token: float
    finished: float

    @property
    def ttft(self) -> float:
        """Time to first token, seconds from arrival."""
        return self.first_token - self.arrival

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, seconds; None if there is only one."""
        if self.output_tokens < 2:
            return None
        return (self.finished - self.first_token) / (self.output_tokens - 1)


@dataclass(frozen=True)
class Replay:
    """What one engine made of the trace."""

    seconds: float  # from the start to the last token
    requests: list[ServedRequest]  # in the order of the trace
    stats: EngineStats

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second of the whole replay, with what it waited for arrivals."""
        return self.stats.output_tokens / self.seconds


class Client:
    """Sends traces to one engine, and observes it for good: make one per engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._stats = EngineStats()
        self._on_finished: Callable[[], None] = lambda: None
        engine.plugins.register_observer(self)

    def replay(self, trace: Trace, on_finished: Callable[[], None] = lambda: None) -> Replay:
        """Open each request of ``trace`` when it arrives, and step until all are done.

        The engine must be idle. ``on_finished`` is called for every request that finishes. Raises
        `PageloomError` if a request got another number of tokens than the trace says: then the
        work was not what was to be measured.
        """
        self._stats = stats = EngineStats()
        self._on_finished = on_finished
        opened = 0
        start = time.monotonic()
        while opened < len(trace) or self.engine.has_requests:
            now = time.monotonic() - start
            while opened < len(trace) and trace[opened].arrival <= now:
                self.open(trace[opened], request_id=f"bench-{opened}")
                opened += 1
            if self.engine.has_requests:
                self.engine.advance()
            else:
                time.sleep(trace[opened].arrival - now)
        seconds = time.monotonic() - start
        records = {record.request_id: record for record in stats.requests}
        served = [
            _served(number, request, records[f"bench-{number}"], start)
            for number, request in enumerate(trace)
        ]
        return Replay(seconds, served, stats)

    def open(self, request: TraceRequest, request_id: str) -> OpenRequest:
        """Queue a request that decodes greedily to its full length, whatever the model says.

        Raises `ValueError` if the engine cannot serve it.
        """
        return self.engine.open_request(
            request.prompt,
            SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True),
            request_id=request_id,
            user=request.user,
            priority=request.priority,
            deliver=_discard,
        )

    @hookimpl
    def step_finished(self, record: StepRecord) -> None:
        self._stats.step_finished(record)

    @hookimpl
    def request_finished(self, record: RequestRecord) -> None:
        self._stats.request_finished(record)
        self._on_finished()


def _discard(chunk: CompletionChunk) -> None: ...


def _served(
    number: int, request: TraceRequest, record: RequestRecord, start: float
) -> ServedRequest:
    if (record.output_tokens, record.finish_reason) != (request.output_tokens, "length"):
        raise PageloomError(
            f"request {number + 1} of the trace ended with {record.output_tokens} output tokens "
            f"and the reason {record.finish_reason!r}, but should have {request.output_tokens} and "
            "'length': the work was not the same for all, so nothing is compared"
        )
    if record.first_scheduled is None or record.first_token is None:
        raise RuntimeError(f"request {number + 1} has output, but no time of its first token")
    return ServedRequest(
        prompt_tokens=record.prompt_tokens,
        cached_tokens=record.cached_tokens,
        output_tokens=record.output_tokens,
        preemptions=record.preemptions,
        arrival=request.arrival,
        first_scheduled=record.first_scheduled - start,
        first_token=record.first_token - start,
        finished=record.finished - start,
    )
