"""A run as rows of text, which the terminal and the page share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from pageloom.bench.attention.matrix import Case
from pageloom.bench.attention.results import Array, Entry, Run
from pageloom.bench.statistics import CONFIDENCE, MIN_ROUNDS, Ratio, paired_ratio, show_ratio
from pageloom.errors import counted


@dataclass(frozen=True)
class Report:
    """A run, with one backend as the baseline of the others."""

    run: Run
    baseline: str

    @cached_property
    def speedups(self) -> dict[tuple[Case, str], Ratio]:
        """How many times as fast as the baseline, by case and backend, where both were timed."""
        found = {}
        for entry in self.run.entries:
            base = self.entry(entry.case, self.baseline)
            if base is None or entry is base:
                continue
            ratio = paired_ratio(_column(base.seconds), _column(entry.seconds))
            if ratio is not None:
                found[entry.case, entry.backend] = ratio
        return found

    def entry(self, case: Case, backend: str) -> Entry | None:
        of_case = (e for e in self.run.entries if e.case == case)
        return next((e for e in of_case if e.backend == backend), None)

    @property
    def backends(self) -> list[str]:
        return list(dict.fromkeys(entry.backend for entry in self.run.entries))

    @property
    def rounds(self) -> int:
        return max((len(entry.forward) for entry in self.run.entries), default=0)


def header(report: Report) -> list[str]:
    return [
        "",
        "ms/layer",
        "plan",
        f"speed / {report.baseline}",
        "GB/s (of read, of copy)",
        "GFLOP/s (of matrix)",
        "of roofline",
    ]


def tables(report: Report) -> Iterator[tuple[str, list[list[str]]]]:
    """For every case a title, and a row for each backend that was timed."""
    for case in report.run.cases:
        entries = [entry for entry in report.run.entries if entry.case == case]
        layers = f", {entries[0].layers} of {counted(case.layers, 'layer')}"
        yield title(case) + layers, [_cells(report, entry) for entry in entries]


def title(case: Case) -> str:
    words = {
        "decode": f"decode, batch {case.batch}, context {case.context}",
        "prefill": f"prefill of {case.query} tokens, batch {case.batch}, context {case.context}",
        "mixed": f"{counted(case.batch - 1, 'decode')} and a prefill of {case.query} tokens, "
        f"contexts up to {case.context}",
    }
    parts = [words[case.phase], case.shape, case.dtype]
    parts += [f"cache in {case.quantizer}"] if case.quantizer else []
    parts += [f"blocks of {case.block_size}"] if case.block_size else []
    return ", ".join(parts)


def absences(report: Report) -> Iterator[str]:
    """Who was not timed, why, and in which cases."""
    found = (*report.run.refused, *report.run.failed)
    cases = {one.case for one in found} | {case.id for case in report.run.cases}
    grouped: dict[str, set[str]] = {}
    for one in found:
        grouped.setdefault(f"{one.backend} {one.reason}", set()).add(one.case)
    for sentence, where in grouped.items():
        yield f"{sentence} ({'every case' if where == cases else ', '.join(sorted(where))})"


def notes(report: Report) -> Iterator[str]:
    """What one has to know to read the table, one sentence or two each."""
    rounds = report.rounds
    yield (
        f"Medians over {counted(rounds, 'interleaved round')}. A step is planned once for all "
        "layers; plan is the part of a layer's time that this takes in the whole model. GB/s are "
        "of K and V, each read once."
    )
    if rounds >= MIN_ROUNDS:
        yield (
            f"Speed is how many times as fast as {report.baseline}, with the {CONFIDENCE:.0%} "
            "bootstrap interval of the median of the rounds' ratios."
        )
    else:
        yield (
            f"Speed is how many times as fast as {report.baseline}; in parentheses, the least and "
            f"the greatest ratio of a round. An interval takes {MIN_ROUNDS} rounds or more."
        )
    yield f"In the same rounds, this machine: {machine_rates(report.run)}."
    yield (
        "The roofline is what these rates allow: the longer of the times that reading K and V, "
        "and the products, take."
    )
    if any(entry.graph for entry in report.run.entries):
        eager = {e.backend for e in report.run.entries if e.case.phase == "decode" and not e.graph}
        but = f", but not those of {', '.join(sorted(eager))}" if eager else ""
        yield f"The layers of decodes ran as CUDA graphs{but}."
    yield f"Machine: {report.run.machine}."


def machine_rates(run: Run) -> str:
    def median_of(name: str, dtypes: set[str]) -> float:
        entries = [entry for entry in run.entries if entry.case.dtype in dtypes]
        return _median(np.concatenate([getattr(entry, name) for entry in entries])) / 1e9

    dtypes = dict.fromkeys(entry.case.dtype for entry in run.entries)
    parts = [f"{name} {median_of(name, set(dtypes)):,.1f} GB/s" for name in ("read", "copy")]
    parts += [
        f"matrix products {median_of('matrix', {dtype}):,.0f} GFLOP/s ({dtype})" for dtype in dtypes
    ]
    return ", ".join(parts)


def _cells(report: Report, entry: Entry) -> list[str]:
    baseline = entry.backend == report.baseline
    speedup = report.speedups.get((entry.case, entry.backend))
    read, copy, matrix = (
        f"{_median(share):.0%}"
        for share in (
            entry.bandwidth / entry.read,
            entry.bandwidth / entry.copy,
            entry.rate / entry.matrix,
        )
    )
    return [
        f"{entry.backend} (peer)" if entry.is_peer else entry.backend,
        f"{_median(entry.seconds) * 1e3:,.4g}",
        f"{_median(entry.plan / entry.case.layers / entry.seconds):.1%}",
        "1" if baseline else show_ratio(speedup),
        f"{_median(entry.bandwidth) / 1e9:,.3g} ({read}, {copy})",
        f"{_median(entry.rate) / 1e9:,.3g} ({matrix})",
        f"{_median(entry.roofline / entry.seconds):.0%}",
    ]


def _median(values: Array) -> float:
    return float(np.median(values))


def _column(values: Array) -> list[list[float]]:
    """A round has one number: see `paired_ratio`."""
    return [[float(value)] for value in values]
