"""``pageloom bench engine``: the same trace through several configurations."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pageloom.commands.comparing import make_trace, print_table, requests_progress
from pageloom.commands.files import require_folder_of, write_file
from pageloom.commands.options import (
    ConfigsArgument,
    JSONOption,
    OutputTokensOption,
    PrefixGroupsOption,
    PrefixTokensOption,
    PromptTokensOption,
    SetOption,
    TraceOption,
)
from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from rich.progress import Progress

    from pageloom.bench.serving.compare import Side
    from pageloom.bench.serving.quality import Quality, Sample
    from pageloom.bench.serving.report import Comparison
    from pageloom.bench.serving.trace import Trace


def engine(
    configs: ConfigsArgument,
    overrides: SetOption,
    rounds: Annotated[int, typer.Option(min=1, help="Each runs every config once.")] = 6,
    trace: TraceOption = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="How many; default 64, or all of --trace.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(help="Poisson arrivals per second. Default: all at once, or as in --trace."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of lengths, token ids and arrivals.")] = 0,
    prompt_tokens: PromptTokensOption = None,
    output_tokens: OutputTokensOption = None,
    prefix_tokens: PrefixTokensOption = None,
    prefix_groups: PrefixGroupsOption = None,
    keep_prefix_cache: Annotated[
        bool, typer.Option("--keep-prefix-cache", help="Do not empty it before each turn.")
    ] = False,
    quality: Annotated[
        bool,
        typer.Option("--quality", help="Measure perplexity and divergence from the baseline too."),
    ] = False,
    text: Annotated[
        Path | None,
        typer.Option(help="Measure quality on this text, instead of help texts of Python's."),
    ] = None,
    quality_tokens: Annotated[
        int | None, typer.Option(min=2, help="Of that text, from its start; default 4096.")
    ] = None,
    json_file: JSONOption = None,
    markdown: Annotated[Path | None, typer.Option(help="Write the table.")] = None,
) -> None:
    """Compare configs on the same trace, in interleaved rounds: throughput, latency, KV memory.

    Every request decodes greedily to its full length, so that all configs do the same work.
    """
    require_folder_of(json_file)
    require_folder_of(markdown)
    own = (prompt_tokens, output_tokens, prefix_tokens, prefix_groups)
    wanted = make_trace(trace, requests, seed, *own)
    if rate is not None:
        from pageloom.bench.serving.trace import with_poisson_arrivals

        wanted = with_poisson_arrivals(wanted, rate, seed)
    sample = _sample(quality, text, quality_tokens)

    from pageloom.bench.serving.report import as_json, as_markdown, notes, table

    def save(comparison: Comparison) -> None:
        if json_file is not None:
            data = {"command": sys.argv[1:], **as_json(comparison)}
            write_file(json_file, json.dumps(data).encode())

    comparison = _measure(
        configs,
        overrides,
        wanted,
        rounds,
        seed,
        sample,
        keep_prefix_cache=keep_prefix_cache,
        save=save,
    )
    print_table(table(comparison), notes(comparison))
    if markdown is not None:
        write_file(markdown, as_markdown(comparison).encode())


def _sample(quality: bool, file: Path | None, most_tokens: int | None) -> Sample | None:
    """The text that quality is to be measured on, if it is."""
    from pageloom.bench.serving.quality import DEFAULT_TOKENS, Sample

    if quality or file is not None:
        return Sample.load(file, most_tokens or DEFAULT_TOKENS)
    if most_tokens is not None:
        raise PageloomError("--quality-tokens needs --quality, or --text with a file")
    return None


def _measure(
    configs: list[str],
    overrides: list[str],
    wanted: Trace,
    rounds: int,
    seed: int,
    sample: Sample | None,
    *,
    keep_prefix_cache: bool,
    save: Callable[[Comparison], None],
) -> Comparison:
    """``save`` is called after each round: all of them may take hours."""
    from pageloom.bench.machine import Machine, load_average
    from pageloom.bench.serving.compare import build_sides, prepare, run_rounds, warm_up
    from pageloom.bench.serving.report import Comparison

    load, done = load_average(), []
    with requests_progress() as progress:
        task = progress.add_task("", total=None)

        def say(what: str) -> None:
            progress.update(task, description=what)

        sides = build_sides(configs, overrides, lambda name: say(f"loading {name}"))
        for side in sides:
            report = "\n".join(side.engine.memory.lines())
            progress.console.print(
                f"{side.name}: {report}", markup=False, highlight=False, soft_wrap=True
            )
        trace = prepare(wanted, sides, seed)
        quality = _quality(sides, sample, progress) if sample is not None else None
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
            machine = Machine.describe(load)
            comparison = Comparison(sides, trace, tuple(done), machine, quality)
            save(comparison)
    return comparison


def _quality(sides: Sequence[Side], sample: Sample, progress: Progress) -> Quality:
    from pageloom.bench.serving.quality import measure_quality

    task = progress.add_task("measuring quality")
    engines = {side.name: side.engine for side in sides}
    measured = measure_quality(
        engines, sample, lambda done, of: progress.update(task, completed=done, total=of)
    )
    progress.remove_task(task)
    return measured
