"""The control plane without a model: real plans, made-up tokens."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from random import Random
from typing import NamedTuple
from zlib import crc32

from pageloom.contract import Scheduler
from pageloom.memory import BlockPool
from pageloom.scheduling.plan import Chunk, Limits, PreemptionMode, StepPlan
from pageloom.scheduling.planner import Planner
from pageloom.scheduling.request import Branch, Request, Status

VOCAB_SIZE = 1 << 15


class SimulatedStep(NamedTuple):
    plan: StepPlan
    finished: list[Request]


class Simulation:
    """A `Planner` whose steps compute nothing: what a model would have drawn is made up.

    The same requests get the same tokens, in whatever batch and after any preemption. Token ids
    are below `VOCAB_SIZE`. Override `draw` and `candidates` for a model of other habits.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 32,
        max_model_len: int = 64,
        enable_chunked_prefill: bool = True,
        enable_prefix_caching: bool = True,
        preemption_mode: PreemptionMode = "auto",
        host_blocks: int = 0,
        clock: Callable[[], float] = time.monotonic,
        steps_in_flight: int = 1,
    ) -> None:
        """``host_blocks`` is the size of the host pool; with 0 nothing can be swapped."""
        self._steps_in_flight = steps_in_flight
        self._in_flight: deque[StepPlan] = deque()
        self.planner = Planner(
            scheduler,
            BlockPool(num_blocks),
            Limits(
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=max_num_batched_tokens,
                max_model_len=max_model_len,
                block_size=block_size,
                enable_chunked_prefill=enable_chunked_prefill,
                enable_prefix_caching=enable_prefix_caching,
                preemption_mode=preemption_mode,
            ),
            policy=type(scheduler).__name__,
            host=BlockPool(host_blocks) if host_blocks else None,
            clock=clock,
            steps_in_flight=steps_in_flight,
        )

    def draw(self, branch: Branch, count: int) -> list[int]:
        """The next tokens of a branch: one, or the first of each of ``count`` branches."""
        seed = crc32(branch.request.request_id.encode()) + 977 * len(branch.output_token_ids)
        if count == 1:
            return [(seed + 7919 * branch.index) % VOCAB_SIZE]
        return [(seed + 7919 * index) % VOCAB_SIZE for index in range(count)]

    def candidates(self, branch: Branch, count: int) -> list[tuple[int, float]]:
        """The ``count`` likeliest next tokens of a beam, with log-probabilities."""
        random = Random(f"{branch.request.request_id} {branch.output_token_ids}")
        tokens = random.sample(range(VOCAB_SIZE), count)
        logprobs = sorted((-random.expovariate(0.5) for _ in range(count)), reverse=True)
        return list(zip(tokens, logprobs, strict=True))

    def add(self, request: Request) -> None:
        self.planner.add(request)

    def step(self) -> SimulatedStep:
        """Plan, pretend to compute the oldest plan in flight, and finish what has ended."""
        while len(self._in_flight) < self._steps_in_flight:
            plan = self.planner.plan()
            if not plan.chunks:
                self.planner.complete(plan)
                if not self._in_flight:
                    return SimulatedStep(plan, [])
                break
            self._in_flight.append(plan)
        plan = self._in_flight.popleft()
        finished = []
        for request, chunks in groupby(plan.chunks, key=lambda chunk: chunk.branch.request):
            open_still = request.status is not Status.FINISHED
            if open_still and self._advance(request, list(chunks)):
                finished.append(request)
        self.planner.complete(plan)
        return SimulatedStep(plan, finished)

    def drive(self, arrivals: Iterable[Request], backlog: int = 32) -> Iterator[SimulatedStep]:
        """Run until nothing is left, adding requests so that ``backlog`` of them wait."""
        arrivals = iter(arrivals)
        more = True
        while more or self.planner.has_requests:
            while more and len(self.planner.waiting) < backlog:
                request = next(arrivals, None)
                more = request is not None
                if request is not None:
                    self.add(request)
            if self.planner.has_requests:
                yield self.step()

    def _advance(self, request: Request, chunks: Sequence[Chunk]) -> bool:
        """Whether the request has come to its end, and was finished."""
        planner = self.planner
        if request.beams is not None:
            count = request.beams.num_candidates
            drawn = [self.candidates(c.branch, count) for c in chunks if c.draws]
            planner.advance_beams(chunks, drawn)
            if request.beams.done:
                planner.finish(request, "length")
            return request.beams.done
        for chunk in chunks:
            token_ids = self.draw(chunk.branch, chunk.draws) if chunk.draws else []
            for branch in planner.advance(chunk, token_ids):
                if reason := request.stop_reason_of(branch):
                    if len(request.branches) == 1:
                        planner.finish(request, reason)
                        return True
                    planner.end(branch)
        return False
