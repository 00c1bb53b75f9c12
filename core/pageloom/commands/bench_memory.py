"""``pageloom bench memory``: the vLLM paper's numbers of KV memory, without a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pageloom.commands.files import make_folder, require_folder_of, write_file
from pageloom.commands.options import ConfigArgument, JSONOption, OutputOption, SetOption
from pageloom.errors import PageloomError, shorten

if TYPE_CHECKING:
    from pageloom.bench.memory.report import Report
    from pageloom.bench.memory.settings import Settings
    from pageloom.bench.workload import LengthSource


def memory(
    path: ConfigArgument,
    overrides: SetOption,
    output: OutputOption = None,
    json_file: JSONOption = None,
    trace: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=FILE",
            help="Real lengths of sharegpt or alpaca, in place of distributions: a JSON object "
            'per line, such as {"prompt_tokens": 161, "output_tokens": 338}.',
        ),
    ] = None,
    scale: Annotated[
        float,
        typer.Option(min=0.1, max=100, help="How much is simulated; 1 takes about a minute."),
    ] = 1.0,
) -> None:
    """Measure KV memory as the vLLM paper did, and compare: waste, batch sizes, sharing.

    Runs this engine's scheduler and block pool, and the paper's baselines, on the paper's
    workloads. No model is loaded: CONFIG says how steps are planned (scheduler, block size,
    preemption), runtime.seed what is drawn.
    """
    from pageloom.bench.figures import require_matplotlib
    from pageloom.bench.memory import report as reports
    from pageloom.bench.memory.paged import check_fit
    from pageloom.bench.memory.settings import settings_from
    from pageloom.config import load_config

    if output is not None:
        require_matplotlib()
        make_folder(output)
    require_folder_of(json_file)
    settings = settings_from(load_config(path, overrides))
    check_fit(settings)
    report = _measure(settings, _sources(trace or []), scale)
    _print(report)
    if json_file is not None:
        write_file(json_file, json.dumps(reports.as_json(report), indent=1, default=str).encode())
    if output is not None:
        _write_page(output, report)


def _sources(traces: list[str]) -> Mapping[str, LengthSource]:
    from pageloom.bench.memory.experiments import SOURCES
    from pageloom.bench.memory.recorded import read_lengths

    sources = dict(SOURCES)
    by_option = {name.lower(): name for name in SOURCES}
    for text in traces:
        option, _, file = text.partition("=")
        name = by_option.get(option.lower())
        if name is None or not file:
            raise PageloomError(
                f"--trace is {shorten(text)!r}, but must be {' or '.join(by_option)}, then = and a "
                "file, such as sharegpt=lengths.jsonl"
            )
        sources[name] = read_lengths(name, Path(file))
    return sources


def _measure(settings: Settings, sources: Mapping[str, LengthSource], scale: float) -> Report:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from pageloom.bench.memory.experiments import Results, runs
    from pageloom.bench.memory.report import make_report

    results = Results(sources)
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        todo = runs(settings, results, scale)
        task = progress.add_task("", total=len(todo))
        for name, run in todo:
            progress.update(task, description=name)
            run()
            progress.advance(task)
    return make_report(settings, results)


def _print(report: Report) -> None:
    from itertools import groupby

    from rich.console import Console
    from rich.table import Table

    from pageloom.bench.memory.text import HEADER, cells, notes, numbered

    console, reasons = Console(), numbered(report)
    for title, rows in groupby(report.rows, key=lambda row: row.figure):
        table = Table(title=title, title_justify="left")
        for column in HEADER:
            table.add_column(column, justify="right" if column else "left", overflow="fold")
        for row in rows:
            table.add_row(*cells(row, reasons))
        console.print(table)
    for reason, number in reasons.items():
        console.print(f"{number}. {reason}", highlight=False, markup=False)
    for note in notes(report):
        console.print(note, highlight=False, markup=False)


def _write_page(folder: Path, report: Report) -> None:
    from pageloom.bench.memory.figures import draw
    from pageloom.bench.memory.page import make_page

    images = draw(report.results)
    for name, data in images.items():
        write_file(folder / name, data)
    write_file(folder / "index.html", make_page(report).as_html(images).encode())
