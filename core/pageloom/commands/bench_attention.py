"""``pageloom bench attention``: attention backends, each checked and then timed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pageloom.commands.files import make_folder, require_folder_of, write_file
from pageloom.commands.options import JSONOption, OutputOption, set_option
from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from pageloom.bench.attention.regressions import Changes
    from pageloom.bench.attention.report import Report
    from pageloom.bench.attention.run import MatrixRun

MatrixArgument = Annotated[
    str, typer.Argument(metavar="CONFIG", help="YAML file of shapes and cases.")
]


def attention(
    path: MatrixArgument,
    overrides: Annotated[list[str], set_option("seed=1")],
    baseline: Annotated[
        str, typer.Option(metavar="NAME", help="The backend that others are measured against.")
    ] = "torch_paged",
    output: OutputOption = None,
    json_file: JSONOption = None,
    compare: Annotated[
        Path | None,
        typer.Option(
            metavar="OLD.json", help="An earlier --json: exit with 1 if a backend became slower."
        ),
    ] = None,
    margin: Annotated[
        float,
        typer.Option(min=0, max=10, help="With --compare: how much slower is still no regression."),
    ] = 0.1,
) -> None:
    """Compare attention backends on random keys and values: speed, bandwidth, matrix rate.

    Every registered backend that accepts a case takes part in it, and is timed once it has been
    checked against attention in float64. Rounds are interleaved. No model is loaded. Exits with 1
    if a backend is wrong or fails.
    """
    _require_extra()
    from pageloom.bench.attention import regressions
    from pageloom.bench.attention.matrix import load_matrix
    from pageloom.bench.attention.report import Report, absences
    from pageloom.bench.attention.results import load_run, read_run
    from pageloom.bench.attention.run import MatrixRun
    from pageloom.bench.figures import require_matplotlib

    require_folder_of(json_file)
    if output is not None:
        require_matplotlib()
        make_folder(output)
    earlier = None if compare is None else load_run(compare)
    run = MatrixRun(load_matrix(path, overrides))
    run.require(baseline)
    data = _measure(run)
    if json_file is not None:
        write_file(json_file, json.dumps(data, indent=1).encode())
    report = Report(read_run(data), baseline)
    if not report.run.entries:
        raise PageloomError(f"no backend was timed: {'; '.join(absences(report))}")
    changes = None
    if earlier is not None:
        changes = regressions.compare(report.run, earlier, margin, str(compare))
    _print(report, changes)
    if output is not None:
        _write_page(output, report, changes)
    if report.run.failed or (changes is not None and changes.regressions):
        raise typer.Exit(1)


def _require_extra() -> None:
    try:
        import hypothesis  # noqa: F401 (the oracle is part of `pageloom.testing`)
        import pytest_benchmark  # noqa: F401
    except ImportError as error:
        raise PageloomError(
            f"{error.name} is not installed, which this needs: pip install 'pageloom[bench]'"
        ) from error


def _measure(run: MatrixRun) -> dict[str, Any]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from pageloom.bench.attention.results import as_json
    from pageloom.bench.machine import Machine, load_average

    load, results = load_average(), []
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        refresh_per_second=1,  # drawing takes time from what is measured
        transient=True,
    ) as progress:
        task = progress.add_task("", total=len(run.matrix.cases))
        for case in run.matrix.cases:

            def say(what: str, name: str = case.id) -> None:
                progress.update(task, description=f"{name}: {what}")

            results.append(run.run(case, say))
            progress.advance(task)
    return as_json(results, Machine.describe(load))


def _print(report: Report, changes: Changes | None) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from pageloom.bench.attention import regressions
    from pageloom.bench.attention.report import absences, header, notes, tables

    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # in a file nothing has to fit

    def show(title: str, names: list[str], rows: list[list[str]], left: int) -> None:
        table = Table(title=title, title_justify="left", box=SIMPLE_HEAD)
        for number, name in enumerate(names):
            table.add_column(name, justify="left" if number < left else "right", overflow="fold")
        for row in rows:
            table.add_row(*row)
        console.print(table)

    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False)

    for title, rows in tables(report):
        show(title, header(report), rows, left=1)
    for sentence in absences(report):
        say(f"Not timed: {sentence}.")
    for note in notes(report):
        say(note)
    if changes is not None:
        rows = [list(row) for row in regressions.rows(changes)]
        show("Since the earlier run", list(regressions.HEADER), rows, left=2)
        for note in regressions.change_notes(changes):
            say(note)


def _write_page(folder: Path, report: Report, changes: Changes | None) -> None:
    from pageloom.bench.attention.figures import draw
    from pageloom.bench.attention.page import make_page

    images = draw(report)
    for name, data in images.items():
        write_file(folder / name, data)
    write_file(folder / "index.html", make_page(report, changes).as_html(images).encode())
