"""The report's figures: speed against the baseline, and the roofline."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pageloom.bench.attention.matrix import PHASES, Case
from pageloom.bench.attention.report import Report
from pageloom.bench.figures import COLORS, new_figure, png

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MARKERS = dict(zip(PHASES, "os^", strict=True))
BAR = 0.8  # of the room that a case has


def draw(report: Report) -> dict[str, bytes]:
    """PNG files by name."""
    images = {}
    for phase in PHASES:
        cases = [case for case in report.run.cases if case.phase == phase]
        if any(report.entry(case, report.baseline) for case in cases):
            images[f"speed_{phase}.png"] = png(_speed(report, phase, cases))
    images["roofline.png"] = png(_roofline(report))
    return images


def _speed(report: Report, phase: str, cases: list[Case]) -> Figure:
    backends = report.backends
    figure, (axes,) = new_figure(
        f"{phase.capitalize()}: speed, {report.baseline} = 1",
        height=1.2 + 0.3 * len(cases) * (1 + len(backends)),
    )
    width = BAR / len(backends)
    for number, backend in enumerate(backends):
        for place, case in enumerate(cases):
            position = place - BAR / 2 + (number + 0.5) * width
            ratio = report.speedups.get((case, backend))
            if ratio is not None:
                value, low, high = ratio.value, ratio.low, ratio.high
            elif backend == report.baseline and report.entry(case, backend):
                value = low = high = 1.0
            else:
                axes.text(0, position, f" {backend}: not timed", va="center", color="#777777")
                continue
            axes.barh(position, value, width * 0.9, color=COLORS[number % len(COLORS)])
            axes.errorbar(
                value,
                position,
                xerr=[[max(0, value - low)], [max(0, high - value)]],
                color="black",
                capsize=2,
            )
            axes.text(high, position, f"  {backend} {value:.2f}", va="center")
    axes.axvline(1, color="black", linewidth=0.8, linestyle=":")
    axes.set_yticks(range(len(cases)), [_label(case) for case in cases])
    axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set_xlim(left=0)
    axes.set_xlabel("times as fast; lines: interval over the rounds")
    return figure


def _roofline(report: Report) -> Figure:
    """Achieved FLOP/s over FLOP per byte of K and V (Williams et al. 2009)."""
    run = report.run
    figure, (axes,) = new_figure("Roofline: what each backend makes of this machine", height=6)
    intensity = [entry.flop / entry.kv_bytes for entry in run.entries]
    x = np.geomspace(min(intensity) / 3, max(intensity) * 3, 200)
    read = float(np.median(np.concatenate([entry.read for entry in run.entries])))
    for dtype in dict.fromkeys(entry.case.dtype for entry in run.entries):
        rates = [entry.matrix for entry in run.entries if entry.case.dtype == dtype]
        peak = float(np.median(np.concatenate(rates)))
        axes.plot(x, np.minimum(read * x, peak) / 1e9, color="black", linewidth=1)
        axes.text(x[-1], peak / 1e9, f"{dtype} products ", ha="right", va="bottom")
    for number, backend in enumerate(report.backends):
        for phase, marker in MARKERS.items():
            mine = [e for e in run.entries if (e.backend, e.case.phase) == (backend, phase)]
            axes.plot(
                [entry.flop / entry.kv_bytes for entry in mine],
                [float(np.median(entry.rate)) / 1e9 for entry in mine],
                linestyle="none",
                marker=marker,
                markersize=8,
                alpha=0.8,
                color=COLORS[number % len(COLORS)],
                label=f"{backend}, {phase}" if mine else None,
            )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("FLOP per byte of K and V")
    axes.set_ylabel("GFLOP/s")
    axes.grid(which="both", color="#eeeeee")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    return figure


def _label(case: Case) -> str:
    return case.id.removeprefix(f"{case.phase}-").replace(f"-{case.shape}-", f"\n{case.shape}-")
