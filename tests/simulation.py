"""Drive the control plane without a model: every sampled token is 1."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from pageloom.contract import Scheduler
from pageloom.memory import BlockPool
from pageloom.scheduling import Limits, Planner, Request, SamplingParams, StepPlan


def make_planner(
    scheduler: Scheduler,
    *,
    num_blocks: int = 64,
    block_size: int = 4,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_model_len: int = 64,
    enable_chunked_prefill: bool = True,
) -> Planner:
    """A planner on a clock that counts its own readings."""
    ticks = iter(range(1 << 62))
    limits = Limits(
        max_num_seqs, max_num_batched_tokens, max_model_len, block_size, enable_chunked_prefill
    )
    pool = BlockPool(num_blocks)
    return Planner(scheduler, pool, limits, policy="tested", clock=lambda: float(next(ticks)))


def make_request(name: object, prompt: int, output: int, arrival: float = 0.0, **kwargs) -> Request:
    params = SamplingParams(max_tokens=output, temperature=0.0)
    return Request(str(name), [0] * prompt, params, arrival_time=arrival, **kwargs)


def step(planner: Planner) -> tuple[StepPlan, list[Request]]:
    """Plan, pretend to compute, and finish what reached its length. Returns the finished ones."""
    plan = planner.plan()
    finished = []
    for chunk in plan.chunks:
        planner.advance(chunk, 1 if chunk.samples else None)
        request = chunk.branch.request
        if chunk.samples and request.stop_reason_of(chunk.branch):
            planner.finish(request, "length")
            finished.append(request)
    return plan, finished


def drive(
    planner: Planner, arrivals: Iterable[Request], backlog: int = 32
) -> Iterator[tuple[StepPlan, list[Request]]]:
    """Run until nothing is left, adding requests so that ``backlog`` of them wait."""
    arrivals = iter(arrivals)
    more = True
    while more or planner.has_requests:
        while more and len(planner.waiting) < backlog:
            request = next(arrivals, None)
            more = request is not None
            if request is not None:
                planner.add(request)
        if planner.has_requests:
            yield step(planner)
