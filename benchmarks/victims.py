"""What preemption costs: tokens computed again, by who gives way when blocks run out.

    python benchmarks/victims.py [--seeds 8] [--requests 400] [--blocks 983] [--max-num-seqs 256]
                                 [--json FILE]

Requests as long as ShareGPT's (see `pageloom.bench.workload`) keep coming, 32 of them waiting at
any time, to a pool that runs out of blocks: by default that of OPT-13B on a 40 GB card, 983 blocks
of 16 tokens (vLLM paper, figure 2). Requests that give way are recomputed. No model: see
`pageloom.scheduling.simulation`. Reported is the share of recomputed tokens among all that are
computed, for each policy and victim, with and without prefix caching (which finds a victim's blocks
again, as long as nobody has taken them); and the ratio of both victims' shares for the same seed:
its mean over the seeds, the lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from random import Random
from statistics import mean

from pageloom.bench.workload import SHAREGPT
from pageloom.scheduling import Request, SamplingParams
from pageloom.scheduling.simulation import Simulation
from pageloom_schedulers.fair import Fair
from pageloom_schedulers.fcfs import FCFS
from pageloom_schedulers.policy import Policy, Victim
from pageloom_schedulers.priority import Priority
from pageloom_schedulers.sjf import SJF

STEP = 0.03  # seconds that the simulated clock gains
POLICIES = {"fcfs": FCFS, "priority": Priority, "sjf": SJF, "fair": Fair}


class Pressure(Simulation):
    """The clock and the requests of one seed."""

    def __init__(self, policy: Policy, seed: int, prefix_caching: bool, **limits: int) -> None:
        self.now = 0.0
        self.random = Random(seed)
        super().__init__(
            policy,
            **limits,
            block_size=16,
            max_num_batched_tokens=2048,
            max_model_len=2048,
            enable_prefix_caching=prefix_caching,
            preemption_mode="recompute",
            clock=lambda: self.now,
        )

    def requests(self, count: int):
        for number, lengths in enumerate(SHAREGPT.lengths(count, self.random)):
            yield Request(
                str(number),
                [number] * lengths.prompt_tokens,
                SamplingParams(max_tokens=lengths.output_tokens),
                arrival_time=self.now,
                priority=self.random.randint(-1, 1),
                user=self.random.choice(["a", "b", "c"]),
            )

    def recomputed_share(self, count: int) -> float:
        computed = recomputed = 0
        for plan, _ in self.drive(self.requests(count)):
            self.now += STEP
            computed += plan.num_tokens
            recomputed += sum(chunk.num_recomputed for chunk in plan.chunks)
        return recomputed / computed


def measure(
    policy: type[Policy], seeds: int, requests: int, prefix_caching: bool, **limits: int
) -> dict[Victim, list[float]]:
    """The share of recomputed tokens for each victim and seed."""
    shares: dict[Victim, list[float]] = {}
    for victim, seed in product(Victim, range(seeds)):
        scheduler = policy(policy.Config(victim=victim))
        simulation = Pressure(scheduler, seed, prefix_caching, **limits)
        shares.setdefault(victim, []).append(simulation.recomputed_share(requests))
    return shares


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=983)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    limits = {"num_blocks": options.blocks, "max_num_seqs": options.max_num_seqs}
    rows = []
    print("| policy | prefix caching | last_admitted | least_computed | ratio |")
    print("|---|---|---|---|---|", flush=True)
    for (name, policy), caching in product(POLICIES.items(), [False, True]):
        shares = measure(policy, options.seeds, options.requests, caching, **limits)
        last, least = shares[Victim.last_admitted], shares[Victim.least_computed]
        ratios = [b / a for a, b in zip(last, least, strict=True)]
        print(
            f"| `{name}` | {'on' if caching else 'off'} | {mean(last):.1%} | {mean(least):.1%} | "
            f"{mean(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |",
            flush=True,
        )
        rows.append({"policy": name, "prefix_caching": caching, **shares, "ratios": ratios})
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
