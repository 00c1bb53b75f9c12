"""Whether a server's memory stays flat over thousands of requests.

    python benchmarks/serve_memory.py CONFIG [--requests 5000] [--at-once 64] [--set KEY=VALUE]

Reports the resident memory of the server and of its engine process after each tenth of the
requests. All are streamed and different. The first tenth warms up allocators and caches.
"""

from __future__ import annotations

import argparse
import subprocess
from random import Random

from served import Served, serve

MAX_TOKENS = 8


def resident(server: Served) -> tuple[int, int]:
    """KiB of the server and of its engine process."""
    (engine,) = subprocess.check_output(["pgrep", "-P", str(server.process.pid)], text=True).split()
    web, worker = (
        int(subprocess.check_output(["ps", "-o", "rss=", "-p", str(pid)], text=True))
        for pid in (server.process.pid, engine)
    )
    return web, worker


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config")
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--set", dest="overrides", action="append", default=[])
    options = parser.parse_args()
    random, tenth = Random(0), options.requests // 10
    with serve(options.config, options.overrides) as server:
        for number in range(1, 11):
            bodies = [
                {
                    "prompt": [random.randrange(3, 200) for _ in range(random.randint(1, 64))],
                    "max_tokens": MAX_TOKENS,
                    "ignore_eos": True,
                }
                for _ in range(tenth)
            ]
            server.complete(bodies, options.at_once)
            web, worker = resident(server)
            print(f"{number * tenth} requests: server {web} KiB, engine {worker} KiB", flush=True)


if __name__ == "__main__":
    main()
