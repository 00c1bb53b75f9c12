"""What a step of the control plane costs, without a model."""

from __future__ import annotations

from pageloom.memory import BlockPool
from pageloom.scheduling import Limits, Planner, Request, SamplingParams
from pageloom_schedulers.fcfs import FCFS


def test_step_with_256_running_requests(benchmark):
    """Plan a decode step for 256 requests and advance them; the design allows 2 ms."""
    limits = Limits(256, 2048, max_model_len=4096, block_size=16)
    planner = Planner(FCFS(FCFS.Config()), BlockPool(256 * 256), limits, policy="fcfs")
    for number in range(256):
        params = SamplingParams(max_tokens=3000)
        planner.add(Request(str(number), [0] * 8, params, arrival_time=number))

    def step():
        plan = planner.plan()
        for chunk in plan.chunks:
            planner.advance(chunk, [1])
            chunk.branch.request.stop_reason_of(chunk.branch)
        return plan

    step()
    plan = benchmark(step)
    assert len(plan.chunks) == 256
