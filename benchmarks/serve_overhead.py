"""What serving over HTTP costs: the server beside the offline engine on the same requests.

    python benchmarks/serve_overhead.py [CONFIG] [--rounds 6] [--clients 32] [--set KEY=VALUE]

The requests are the built-in trace of ``pageloom bench engine``, greedy and of fixed length, cut to
``--max-tokens``. In each round the engine in this process generates them all, and the server
streams them to as many clients at once; which comes first changes from round to round. Nobody finds
the prefixes of another round.
The clients share the machine with the server, so their work counts against it. What is reported is
the ratio of output tokens per second.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from served import Served, serve

from pageloom import Engine, SamplingParams
from pageloom.bench.serving.trace import Trace, draw_token_ids, random_trace
from pageloom.bench.statistics import paired_ratio, show_ratio

CONFIG = Path(__file__).parent.parent / "configs" / "smollm2.yaml"


def run_offline(engine: Engine, trace: Trace) -> None:
    engine.reset_prefix_cache()
    params = [
        SamplingParams(temperature=0, max_tokens=request.output_tokens, ignore_eos=True)
        for request in trace
    ]
    engine.generate([list(request.prompt) for request in trace], params)


def run_served(server: Served, trace: Trace, round_name: str) -> None:
    bodies = [
        {
            "prompt": list(request.prompt),
            "max_tokens": request.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "cache_salt": round_name,
        }
        for request in trace
    ]
    server.complete(bodies, len(bodies))


def timed(run: Callable[[], None]) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", default=str(CONFIG))
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=200, help="of output, per request")
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    engine = Engine.from_config(options.config, options.overrides)
    trace = [
        replace(request, output_tokens=min(request.output_tokens, options.max_tokens))
        for request in draw_token_ids(random_trace(options.clients), engine.vocab_size)
    ]
    output_tokens = sum(request.output_tokens for request in trace)
    speeds: dict[str, list[list[float]]] = {"offline": [], "served": []}
    with serve(options.config, options.overrides) as server:
        run_offline(engine, trace[:2])
        run_served(server, trace[:2], "warm-up")
        for number in range(options.rounds):
            sides = {
                "offline": lambda: run_offline(engine, trace),
                "served": lambda name=f"round-{number}": run_served(server, trace, name),
            }
            for side in sorted(sides, reverse=number % 2 == 1):
                speeds[side].append([output_tokens / timed(sides[side])])
            (offline,), (served,) = speeds["offline"][-1], speeds["served"][-1]
            print(
                f"round {number + 1}: offline {offline:.1f}, served {served:.1f} output tokens/s, "
                f"ratio {served / offline:.3f}",
                flush=True,
            )
            if options.json:
                options.json.write_text(json.dumps({"argv": sys.argv[1:], "tokens/s": speeds}))
    ratio = paired_ratio(speeds["served"], speeds["offline"])
    print(f"served / offline, {options.clients} clients: {show_ratio(ratio)}")


if __name__ == "__main__":
    main()
