"""``pageloom bench profile``: how long an engine's steps take, for simulations."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from pageloom.commands.files import require_folder_of
from pageloom.commands.options import ConfigArgument, SetOption
from pageloom.errors import PageloomError

if TYPE_CHECKING:
    from pageloom.bench.simulate.fit import Fit
    from pageloom.bench.simulate.measure import StepTimer, Timings


def profile(
    path: ConfigArgument,
    overrides: SetOption,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Write the profile, as JSON.")],
    seconds: Annotated[
        float, typer.Option(min=1, max=36_000, help="How long to measure, about.")
    ] = 120.0,
    seed: Annotated[int, typer.Option(help="Of token ids.")] = 0,
) -> None:
    """Measure how long steps take on this machine, and fit costs from which any step's duration
    can be told: what `pageloom bench simulate` and the executor "simulated" go by.

    Measured are decodes, chunks of prompts, and both together, in batches and contexts of many
    sizes, in rounds of random order.
    """
    require_folder_of(out)
    from pageloom.bench.machine import Machine, load_average
    from pageloom.bench.simulate.fit import fit
    from pageloom.bench.simulate.measure import StepTimer
    from pageloom.bench.simulate.profile import make_profile
    from pageloom.engine.engine import Engine

    load = load_average()
    with Engine.from_config(path, overrides) as engine:
        fitted = fit(_measure(StepTimer(engine, seed), seconds))
        machine = Machine.describe(load)
        made = make_profile(engine, fitted, machine)
    _print(fitted, str(machine))
    try:
        made.write(out)
    except OSError as error:
        raise PageloomError(f"{out} cannot be written: {error.strerror}") from error


def _measure(timer: StepTimer, seconds: float) -> Timings:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from pageloom.bench.simulate.measure import measure

    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(
        *columns,
        console=Console(stderr=True),
        refresh_per_second=1,  # drawing takes time from what is measured
        transient=True,
    ) as progress:
        task = progress.add_task("", total=1.0)

        def show(what: str, share: float) -> None:
            progress.update(task, description=what, completed=share)

        return measure(timer, seconds, show)


def _print(fitted: Fit, machine: str) -> None:
    from pageloom.bench.simulate.profile import HEADER, cells, notes
    from pageloom.commands.comparing import print_table

    print_table([HEADER, *map(cells, fitted.steps)], [*notes(fitted), machine])
