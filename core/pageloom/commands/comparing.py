"""What the commands that compare under load have in common."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pageloom.errors import PageloomError, counted

if TYPE_CHECKING:
    from rich.progress import Progress

    from pageloom.bench.serving.trace import Trace


def make_trace(
    file: Path | None,
    requests: int | None,
    seed: int,
    prompt_tokens: str | None,
    output_tokens: str | None,
    prefix_tokens: int | None,
    prefix_groups: int | None,
) -> Trace:
    """The trace in ``file``, or a random one; only its prompts may be to be drawn yet.

    Raises `PageloomError` for options that do not go together, by their names.
    """
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
        trace = first_of_trace(file, requests)
    return trace


def first_of_trace(file: Path, requests: int | None) -> Trace:
    """As many requests of a trace, or all. Raises `PageloomError` if it has fewer."""
    from pageloom.bench.serving.trace import read_trace

    trace = read_trace(file)
    if requests is not None and requests > len(trace):
        found = counted(len(trace), "request")
        raise PageloomError(f"{file} has {found}, fewer than --requests {requests}")
    return trace[:requests]


def requests_progress() -> Progress:
    """How many requests are done, on standard error."""
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


def print_table(table: Sequence[Sequence[str]], notes: Iterable[str]) -> None:
    """The header first; the first column has names, the others numbers."""
    from rich.console import Console
    from rich.table import Table

    header, *rows = table
    shown = Table()
    for number, name in enumerate(header):
        shown.add_column(name, justify="right" if number else "left")
    for row in rows:
        shown.add_row(*row)
    console = Console()
    console.print(shown)
    for note in notes:
        console.print(note, highlight=False, markup=False)
