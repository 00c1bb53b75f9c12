"""How far are simulated times off? A trace served for real and simulated, on this machine.

    python benchmarks/simulate_accuracy.py [CONFIG] [--set KEY=VALUE] [--json FILE]

First the steps of the engine are profiled, as by ``pageloom bench profile``, or ``--profile`` is
read. Then two loads are served several times each, and simulated by that profile: all requests at
once, and Poisson arrivals at 70 % of the rate at which the simulation serves the former. Reported
is simulated by measured: the median over rounds, the least and the greatest. Exits with 1 if the
throughput of the first load, or the mean or median TTFT of either, is off by more than --within.

On a machine that others use too, --cpu-time takes processor time for time, both in the profile and
in the rounds. That needs an engine of one thread: --set runtime.num_threads=1.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

from pageloom.bench.machine import Machine, load_average
from pageloom.bench.serving.trace import (
    Trace,
    draw_token_ids,
    parse_span,
    random_trace,
    with_poisson_arrivals,
)
from pageloom.bench.simulate.accuracy import Accuracy, CPUClock, Replayer, WallClock, compare
from pageloom.bench.simulate.cluster import simulate
from pageloom.bench.simulate.fit import fit
from pageloom.bench.simulate.load import trace_load
from pageloom.bench.simulate.measure import StepTimer, measure
from pageloom.bench.simulate.profile import errors, make_profile
from pageloom.bench.simulate.settings import Settings, settings_from
from pageloom.config import load_config
from pageloom.contract.costs import StepProfile
from pageloom.engine.engine import Engine

CHECKED = {
    "all at once": ("output tokens/s", "TTFT mean, s", "TTFT p50, s"),
    "Poisson": ("TTFT mean, s", "TTFT p50, s"),
}


def main() -> None:
    options = _options()
    load, engine = load_average(), Engine.from_config(options.config, options.set)
    clock = CPUClock() if options.cpu_time else WallClock()
    if options.profile is None:
        print(f"profiling for {options.seconds:.0f} s", flush=True)
        fitted = fit(measure(StepTimer(engine, clock=clock.now), options.seconds))
        profile = make_profile(engine, fitted, Machine.describe(load))
        print({name: round(error, 3) for name, error in errors(fitted).items()}, flush=True)
    else:
        profile = StepProfile.read(options.profile)
    settings = settings_from(load_config(options.config, options.set), profile, "simulated")
    trace = draw_token_ids(
        random_trace(
            options.requests,
            prompt_tokens=parse_span(options.prompt_tokens, "--prompt-tokens"),
            output_tokens=parse_span(options.output_tokens, "--output-tokens"),
        ),
        engine.vocab_size,
    )
    replayer = Replayer(engine, clock)
    replayer.replay([replace(request, output_tokens=2) for request in trace[:8]])  # warm up
    found = {}
    rate = 0.7 * _rate(settings, trace)
    for name, asked in (("all at once", trace), ("Poisson", with_poisson_arrivals(trace, rate))):
        found[name] = compare(
            replayer,
            settings,
            asked,
            options.rounds,
            lambda number, name=name: print(f"{name}, round {number + 1}", flush=True),
        )
    wrong = _report(found, options.within)
    print(Machine.describe(load))
    if options.json:
        data = {
            "rate": rate,
            "machine": str(Machine.describe(load)),
            "loads": {
                name: {r.name: [r.simulated, list(r.measured)] for r in rows}
                for name, rows in found.items()
            },
        }
        options.json.write_text(json.dumps(data, indent=1))
    engine.shutdown()
    sys.exit(bool(wrong))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", default="configs/smollm2.yaml")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--profile", type=Path, help="default: measured first")
    parser.add_argument("--seconds", type=float, default=120, help="of profiling")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt-tokens", default="50:500", metavar="LEAST:MOST")
    parser.add_argument("--output-tokens", default="16:200", metavar="LEAST:MOST")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--within", type=float, default=0.15)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def _rate(settings: Settings, trace: Trace) -> float:
    """Requests per second that the simulation serves if all come at once."""
    done = simulate(replace(settings, max_waiting=None), trace_load(trace, Path("the trace")))
    return len(trace) / done.ended


def _report(found: dict[str, list[Accuracy]], within: float) -> int:
    """Print all; returns how many of those that count are too far off."""
    wrong = 0
    for name, rows in found.items():
        print(f"\n{name}: simulated / measured")
        for row in rows:
            least, greatest = row.range
            off = row.name in CHECKED[name] and abs(row.ratio - 1) > within
            wrong += off
            print(
                f"  {row.name:20} {row.simulated:9.3f}  {row.ratio:.2f} "
                f"({least:.2f} to {greatest:.2f}){'  too far off' if off else ''}"
            )
    return wrong


if __name__ == "__main__":
    main()
