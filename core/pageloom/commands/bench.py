"""``pageloom bench``: comparisons that can be repeated."""

from __future__ import annotations

import typer

from pageloom.commands.bench_attention import attention
from pageloom.commands.bench_engine import engine
from pageloom.commands.bench_memory import memory
from pageloom.commands.bench_profile import profile
from pageloom.commands.bench_serve import serve
from pageloom.commands.bench_simulate import simulate

bench = typer.Typer(help="Measure and compare.", no_args_is_help=True)
bench.command()(attention)
bench.command()(engine)
bench.command()(memory)
bench.command()(profile)
bench.command()(serve)
bench.command()(simulate)
