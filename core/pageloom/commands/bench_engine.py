"""``pageloom bench engine``: the same trace through several configurations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pageloom.commands import SetOption
from pageloom.commands.files import require_folder_of, write_file
from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from rich.progress import Progress

    from pageloom.bench.serving.report import Comparison
    from pageloom.bench.serving.trace import Trace

Configs = Annotated[
    list[str],
    typer.Argument(metavar="CONFIG...", help="YAML files; the first is the baseline."),
]
OWN = "Built-in trace: "


def engine(
    configs: Configs,
    overrides: SetOption,
    rounds: Annotated[int, typer.Option(min=1, help="Each runs every config once.")] = 6,
    trace: Annotated[
        Path | None, typer.Option(help="JSON object per line, instead of the built-in trace.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; default 64, or all of --trace.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Poisson arrivals per second. Default: all at once, or as in --trace."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, token ids and arrivals.")] = 0,
    prompt_tokens: Annotated[
        str | None, typer.Option(metavar="LEAST:MOST", help=OWN + "default 50:500.")
    ] = None,
    output_tokens: Annotated[
        str | None, typer.Option(metavar="LEAST:MOST", help=OWN + "default 16:200.")
    ] = None,
    prefix_tokens: Annotated[
        int | None, typer.Option(min=1, help=OWN + "put a shared prefix before every prompt.")
    ] = None,
    prefix_groups: Annotated[
        int | None, typer.Option(min=1, help=OWN + "how many prefixes, in turn; default 1.")
    ] = None,
    keep_prefix_cache: Annotated[
        bool, typer.Option("--keep-prefix-cache", help="Do not empty it before each turn.")
    ] = False,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Write every number, after each round.")
    ] = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table.")] = None,
) -> None:
    """Compare configs on the same trace, in interleaved rounds: throughput, latency, KV memory.

    Every request decodes greedily to its full length, so that all configs do the same work.
    """
    require_folder_of(json_file)
    require_folder_of(markdown)
    own = (prompt_tokens, output_tokens, prefix_tokens, prefix_groups)
    wanted = _trace(trace, requests, rate, seed, *own)

    from pageloom.bench.serving.report import as_json, as_markdown

    def save(comparison: Comparison) -> None:
        if json_file is not None:
            data = {"command": sys.argv[1:], **as_json(comparison)}
            write_file(json_file, json.dumps(data).encode())

    comparison = _measure(
        configs, overrides, wanted, rounds, seed, keep_prefix_cache=keep_prefix_cache, save=save
    )
    _print(comparison)
    if markdown is not None:
        write_file(markdown, as_markdown(comparison).encode())


def _trace(
    file: Path | None,
    requests: int | None,
    rate: float | None,
    seed: int,
    prompt_tokens: str | None,
    output_tokens: str | None,
    prefix_tokens: int | None,
    prefix_groups: int | None,
) -> Trace:
    from pageloom.bench.serving import trace as traces

    if prefix_groups and not prefix_tokens:
        raise PageloomError("--prefix-groups needs --prefix-tokens: how long the prefixes are")
    if file is None:
        trace = traces.random_trace(
            requests or 64,
            prompt_tokens=traces.parse_span(prompt_tokens or "50:500", "--prompt-tokens"),
            output_tokens=traces.parse_span(output_tokens or "16:200", "--output-tokens"),
            prefix_tokens=prefix_tokens or 0,
            prefix_groups=prefix_groups or 1,
            seed=seed,
        )
    elif prompt_tokens or output_tokens or prefix_tokens:
        raise PageloomError(
            "--trace has prompts and lengths of its own: leave out --prompt-tokens, "
            "--output-tokens, --prefix-tokens and --prefix-groups"
        )
    else:
        trace = traces.read_trace(file)
        if requests is not None and requests > len(trace):
            raise PageloomError(
                f"{file} has {len(trace)} requests, fewer than --requests {requests}"
            )
        trace = trace[:requests]
    return trace if rate is None else traces.with_poisson_arrivals(trace, rate, seed)


def _measure(
    configs: list[str],
    overrides: list[str],
    wanted: Trace,
    rounds: int,
    seed: int,
    *,
    keep_prefix_cache: bool,
    save: Callable[[Comparison], None],
) -> Comparison:
    """``save`` is called after each round: all of them may take hours."""
    from pageloom.bench.machine import Machine, load_average
    from pageloom.bench.serving.compare import build_sides, prepare, run_rounds, warm_up
    from pageloom.bench.serving.report import Comparison

    load, done = load_average(), []
    with _progress() as progress:
        task = progress.add_task("", total=None)

        def say(what: str) -> None:
            progress.update(task, description=what)

        sides = build_sides(configs, overrides, lambda name: say(f"loading {name}"))
        trace = prepare(wanted, sides, seed)
        for side in sides:
            say(f"warming up {side.name}")
            warm_up(side, trace)
        progress.update(task, total=rounds * len(sides) * len(trace))
        for finished in run_rounds(
            sides,
            trace,
            rounds,
            keep_prefix_cache=keep_prefix_cache,
            on_turn=lambda number, side: say(f"round {number + 1} of {rounds}, {side.name}"),
            on_finished=lambda: progress.advance(task),
        ):
            done.append(finished)
            comparison = Comparison(sides, trace, tuple(done), Machine.describe(load))
            save(comparison)
    return comparison


def _progress() -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("requests"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=2,  # drawing takes time from what is measured
        transient=True,
    )


def _print(comparison: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    from pageloom.bench.serving.report import notes, table

    header, *rows = table(comparison)
    shown = Table()
    for number, name in enumerate(header):
        shown.add_column(name, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    for note in notes(comparison):
        console.print(note, highlight=False, markup=False)
