"""How latencies are distributed, and what was open when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pageloom.bench.figures import COLORS, new_figure, png
from pageloom.bench.http.report import Report
from pageloom.bench.http.run import Run
from pageloom.bench.http.target import Target

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LATENCIES: dict[str, Callable[[Run], list[float]]] = {
    "TTFT": lambda run: [o.ttft for o in run.succeeded],
    "TPOT": lambda run: [t for o in run.succeeded if (t := o.tpot) is not None],
    "ITL": lambda run: [gap for o in run.succeeded for gap in o.gaps],
    "end to end": lambda run: [o.e2e for o in run.succeeded],
}


def draw(report: Report) -> dict[str, bytes]:
    """PNG files by name."""
    return {"latencies.png": png(_latencies(report)), "load.png": png(_load(report))}


def _latencies(report: Report) -> Figure:
    figure, panels = new_figure("Latencies of all rounds", rows=2, columns=2, height=3)
    for axes, (name, of) in zip(panels, _LATENCIES.items(), strict=True):
        for target, color in _colored(report):
            values = np.sort([value for run in report.runs(target) for value in of(run)])
            shares = 100 * np.arange(1, len(values) + 1) / max(len(values), 1)
            axes.step(values, shares, where="post", color=color, label=target.name)
            if name.lower() in report.slo:
                axes.axvline(report.slo[name.lower()], color="black", linestyle=":")
        axes.set_xlabel(f"{name}, s")
        axes.set_ylabel("percent at most")
        axes.legend(loc="lower right")
    return figure


def _load(report: Report) -> Figure:
    figure, (opened, rate) = new_figure("The first round", rows=2, height=3)
    for target, color in _colored(report):
        run = report.runs(target)[0]
        _open_requests(opened, run, color, target.name)
        _events(rate, run, color, target.name)
    opened.set_ylabel("open requests")
    rate.set_ylabel("events with text per second")
    for axes in (opened, rate):
        axes.set_xlabel("s")
        axes.legend(loc="upper right")
    return figure


def _open_requests(axes: Axes, run: Run, color: str, name: str) -> None:
    changes = [(o.arrival, 1) for o in run.outcomes] + [(o.finished, -1) for o in run.outcomes]
    times, steps = zip(*sorted(changes), strict=True)
    axes.step(times, np.cumsum(steps), where="post", color=color, label=name)


def _events(axes: Axes, run: Run, color: str, name: str) -> None:
    times = [time for o in run.outcomes for time in o.token_times]
    bins: Sequence[float] = np.linspace(0, run.seconds, 51).tolist()
    counts, edges = np.histogram(times, bins)
    axes.stairs(counts / np.diff(edges), edges, color=color, label=name)


def _colored(report: Report) -> list[tuple[Target, str]]:
    return [(target, COLORS[i % len(COLORS)]) for i, target in enumerate(report.targets)]
