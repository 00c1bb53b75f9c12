"""What a run came to: each metric of each server, and every number as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pageloom.bench.comparison import PERCENTILES, Row
from pageloom.bench.http.run import Round, Run, Settings
from pageloom.bench.http.slo import SLO, keeps
from pageloom.bench.http.target import Outcome, Target
from pageloom.bench.machine import Machine
from pageloom.bench.serving.trace import Trace
from pageloom.bench.statistics import Ratio, paired_ratio


@dataclass(frozen=True)
class Metric:
    """One row. It is of a whole run, or else a percentile of a value that each request has."""

    key: str  # in JSON
    name: str
    form: str  # of a value, for `str.format`
    of_run: Callable[[Run], float | None]
    of_request: Callable[[Outcome], float | None] | None = None
    percentile: float = 50
    compared: bool = True  # whether a ratio says something

    def row(self, values: Sequence[float | None], ratios: Sequence[Ratio | None]) -> Row:
        return Row(self.key, self.name, self.form, values, ratios)


def _of_requests(
    key: str, name: str, form: str, of: Callable[[Outcome], float | None]
) -> Iterator[Metric]:
    for percentile in PERCENTILES:

        def of_run(run: Run, percentile: float = percentile) -> float | None:
            return percentile_of([v for o in run.succeeded if (v := of(o)) is not None], percentile)

        yield Metric(
            f"{key}_p{percentile}", f"{name} p{percentile}, s", form, of_run, of, percentile
        )


def _of_gaps(percentile: float) -> Metric:
    def of_run(run: Run) -> float | None:
        return percentile_of([gap for o in run.succeeded for gap in o.gaps], percentile)

    return Metric(f"itl_p{percentile}", f"ITL p{percentile}, s", "{:.4f}", of_run)


def _cached_share(run: Run) -> float | None:
    told = [o for o in run.succeeded if o.cached_tokens is not None and o.prompt_tokens]
    asked = sum(o.prompt_tokens or 0 for o in told)
    return sum(o.cached_tokens or 0 for o in told) / asked if asked else None


METRICS = (
    Metric("requests_per_second", "requests/s", "{:.2f}", lambda r: len(r.succeeded) / r.seconds),
    Metric(
        "output_tokens_per_second",
        "output tokens/s",
        "{:.1f}",
        lambda run: sum(o.output_tokens for o in run.succeeded) / run.seconds,
    ),
    *_of_requests("ttft", "TTFT", "{:.3f}", lambda o: o.ttft),
    *_of_requests("tpot", "TPOT", "{:.4f}", lambda o: o.tpot),
    *(_of_gaps(percentile) for percentile in PERCENTILES),
    *_of_requests("e2e", "end to end", "{:.3f}", lambda o: o.e2e),
    Metric("cached_share", "prefix cache hits", "{:.1%}", _cached_share, compared=False),
    Metric(
        "failed", "failed requests", "{:.0f}",
        lambda run: len(run.outcomes) - len(run.succeeded), compared=False,
    ),
    Metric(
        "late_p99", "sent late p99, s", "{:.4f}",
        lambda run: percentile_of([o.late for o in run.outcomes], 99), compared=False,
    ),
)  # fmt: skip


def _goodput(slo: SLO) -> tuple[Metric, ...]:
    def kept(run: Run) -> int:
        return sum(keeps(outcome, slo) for outcome in run.outcomes)

    return (
        Metric("goodput", "goodput, requests/s", "{:.2f}", lambda run: kept(run) / run.seconds),
        Metric(
            "slo_share", "requests within the SLO", "{:.1%}",
            lambda run: kept(run) / len(run.outcomes), compared=False,
        ),
    )  # fmt: skip


@dataclass(frozen=True)
class Report:
    """All rounds of a run; the first target is the baseline."""

    targets: Sequence[Target]
    trace: Trace  # of the first round
    rounds: Sequence[Round]
    slo: SLO
    settings: Settings
    machine: Machine  # that the load came from

    def runs(self, target: Target) -> list[Run]:
        return [done[target.name] for done in self.rounds]

    @cached_property
    def rows(self) -> list[Row]:
        return [
            self._row(metric) for metric in (*METRICS, *(_goodput(self.slo) if self.slo else ()))
        ]

    @cached_property
    def errors(self) -> dict[str, Counter[str]]:
        """How many requests failed, by target and kind of error."""
        return {
            target.name: Counter(o.error for r in self.runs(target) for o in r.outcomes if o.error)
            for target in self.targets
        }

    def _row(self, metric: Metric) -> Row:
        baseline, *others = ([metric.of_run(run) for run in self.runs(t)] for t in self.targets)
        values = [_median(one) for one in (baseline, *others)]
        if not metric.compared:
            return metric.row(values, [None] * len(others))
        if metric.of_request is None:
            ratios = [_ratio_of_runs(one, baseline) for one in others]
        else:
            first, *rest = self._paired(metric.of_request)
            ratios = [
                paired_ratio(one, first, metric.percentile) if first[0] else None for one in rest
            ]
        return metric.row(values, ratios)

    def _paired(self, of: Callable[[Outcome], float | None]) -> list[list[list[float]]]:
        """``[targets][rounds][requests]``, of the requests that have the value in every run."""
        found = [
            [[None if o.error else of(o) for o in run.outcomes] for run in self.runs(target)]
            for target in self.targets
        ]
        everywhere = [
            number
            for number in range(len(self.trace))
            if all(run[number] is not None for runs in found for run in runs)
        ]
        return [[[run[n] or 0.0 for n in everywhere] for run in runs] for runs in found]


def _ratio_of_runs(values: list[float | None], baseline: list[float | None]) -> Ratio | None:
    if None in values or None in baseline:
        return None
    return paired_ratio([[v or 0.0] for v in values], [[v or 0.0] for v in baseline])


def percentile_of(values: Sequence[float], percentile: float) -> float | None:
    return float(np.percentile(values, percentile)) if len(values) else None


def _median(values: Sequence[float | None]) -> float | None:
    return percentile_of([value for value in values if value is not None], 50)


def as_json(report: Report) -> dict[str, Any]:
    """Everything, down to each request of each turn. Times are seconds from the turn's start."""
    names = [target.name for target in report.targets]
    return {
        "machine": asdict(report.machine),
        "targets": {target.name: asdict(target) for target in report.targets},
        "settings": asdict(report.settings),
        "slo": dict(report.slo),
        "errors": {name: dict(kinds) for name, kinds in report.errors.items()},
        "summary": [row.as_json(names) for row in report.rows],
        "rounds": [
            {name: {"seconds": run.seconds, "requests": [*map(asdict, run.outcomes)]}
             for name, run in done.items()}
            for done in report.rounds
        ],
    }  # fmt: skip
