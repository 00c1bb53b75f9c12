"""How latencies are distributed."""

from __future__ import annotations

import numpy as np

from pageloom.bench.figures import COLORS, new_figure, png
from pageloom.bench.simulate.report import Report

_LATENCIES = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "queued": "in the queue"}
_SHARES = np.linspace(0, 100, 501)  # drawn of however many requests


def draw(report: Report) -> dict[str, bytes]:
    """PNG files by name."""
    figure, panels = new_figure("Latencies", rows=2, columns=2, height=3)
    for axes, (key, name) in zip(panels, _LATENCIES.items(), strict=True):
        for number, outcome in enumerate(report.outcomes):
            values = getattr(outcome.measured, key)
            values = values[~np.isnan(values)]
            if len(values):
                axes.plot(
                    np.percentile(values, _SHARES),
                    _SHARES,
                    color=COLORS[number % len(COLORS)],
                    label=outcome.settings.name,
                )
        if key in report.slo:
            axes.axvline(report.slo[key], color="black", linestyle=":")
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_xlabel(f"{name}, s")
        axes.set_ylabel("percent at most")
        axes.legend(loc="lower right")
    return {"latencies.png": png(figure)}
