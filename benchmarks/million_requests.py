"""A million requests through the control plane: is it fast, flat in memory, and free of leaks?

    python benchmarks/million_requests.py [--requests 1000000] [--json FILE]

Requests of 1 to 48 prompt tokens, half of them behind one of 16 prefixes, and 1 to 48 output
tokens; one in ten has 2 to 4 parallel samples, one in twenty 2 to 4 beams, one in fifty is aborted
at a random moment. The pool is small enough for preemptions, to the host and by recomputation. No
model: see `pageloom.scheduling.simulation`. Reported are steps and tokens per second, the memory
that the process uses at every tenth of the way, and the blocks in use at the end, which must be 0.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pageloom.scheduling import Request, SamplingParams
from pageloom.scheduling.simulation import Simulation
from pageloom_schedulers.fcfs import FCFS

SAMPLING = {
    (kind, width, tokens): SamplingParams(max_tokens=tokens, **{kind: width})
    for kind, widths in (("n", range(1, 5)), ("beam_width", range(2, 5)))
    for width in widths
    for tokens in range(1, 49)
}


def draw_requests(count: int, draw: random.Random) -> Iterator[Request]:
    prefixes = [[draw.randrange(1000) for _ in range(48)] for _ in range(16)]
    for number in range(count):
        prompt = [draw.randrange(1000) for _ in range(draw.randint(1, 48))]
        if draw.random() < 0.5:
            prompt = draw.choice(prefixes) + prompt
        kind, width, luck = "n", 1, draw.random()
        if luck < 0.1:
            width = draw.randint(2, 4)
        elif luck < 0.15:
            kind, width = "beam_width", draw.randint(2, 4)
        params = SAMPLING[kind, width, draw.randint(1, 48)]
        yield Request(str(number), prompt, params, arrival_time=float(number))


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize() / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    draw = random.Random(0)
    simulation = Simulation(
        FCFS(FCFS.Config()),
        num_blocks=200,
        block_size=4,
        max_num_seqs=128,
        max_num_batched_tokens=1024,
        max_model_len=256,
        host_blocks=64,
    )
    planner, done, memory = simulation.planner, Counter[str](), []
    started = time.perf_counter()
    for plan, finished in simulation.drive(draw_requests(options.requests, draw), backlog=128):
        done["steps"] += 1
        done["tokens"] += plan.num_tokens
        done["preempted"] += len(plan.preempted)
        done["blocks swapped out"] += len(plan.swapped_out)
        done["blocks copied"] += len(plan.copies)
        done["recomputed tokens"] += sum(chunk.num_recomputed for chunk in plan.chunks)
        done["cached tokens"] += sum(request.cached_tokens for request in finished)
        done["requests"] += len(finished)
        if planner.running and draw.random() < 0.02 * len(plan.admitted):
            planner.finish(draw.choice(list(planner.running.values())), "abort")
            done["requests"] += 1
            done["aborted"] += 1
        if done["requests"] >= options.requests * (len(memory) + 1) // 10:
            memory.append(resident_mib())
            print(f"{done['requests']:>9} requests, {memory[-1]:.1f} MiB", flush=True)
    seconds = time.perf_counter() - started
    planner.check_integrity()
    report = {
        **done,
        "seconds": seconds,
        "steps per second": done["steps"] / seconds,
        "tokens per second": done["tokens"] / seconds,
        "resident MiB": memory,
        "blocks left": planner.pool.num_used,
        "host blocks left": planner.host.num_used,
    }
    print(json.dumps(report, indent=1))
    if options.json:
        options.json.write_text(json.dumps(report, indent=1))
    sys.exit(bool(report["blocks left"] or report["host blocks left"]))


if __name__ == "__main__":
    main()
