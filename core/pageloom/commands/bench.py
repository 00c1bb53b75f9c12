"""``pageloom bench``: comparisons that can be repeated."""

from __future__ import annotations

import typer

bench = typer.Typer(help="Measure and compare.", no_args_is_help=True)
