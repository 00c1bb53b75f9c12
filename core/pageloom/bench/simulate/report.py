"""What came of a simulation, as rows that put settings side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pageloom.bench.comparison import PERCENTILES, Row
from pageloom.bench.simulate.load import Load
from pageloom.bench.simulate.run import Cluster, Outcome
from pageloom.bench.statistics import Ratio
from pageloom.errors import counted

Value = float | None


@dataclass(frozen=True)
class Report:
    outcomes: Sequence[Outcome]  # the first is the baseline
    load: Load
    cluster: Cluster
    profile: str  # where the costs come from
    slo: Mapping[str, float]  # seconds at most, by ttft, tpot or e2e

    @property
    def names(self) -> list[str]:
        return [outcome.settings.name for outcome in self.outcomes]

    @cached_property
    def rows(self) -> list[Row]:
        return [
            _row(metric, [metric.of(self, outcome) for outcome in self.outcomes])
            for metric in self._metrics()
        ]

    def _metrics(self) -> Sequence[Metric]:
        fairness = FAIRNESS if len(self.load.tenants) > 1 else ()
        return [*RATES, *LATENCIES, *WORK, *fairness, *(GOODPUT if self.slo else ())]


class Metric(NamedTuple):
    key: str  # in JSON
    name: str
    form: str  # of a value, for `str.format`
    of: Callable[[Report, Outcome], Value]


def _per_second(key: str) -> Callable[[Report, Outcome], Value]:
    return lambda _, outcome: _ratio(outcome.measured.counts[key], outcome.measured.ended)


def _share(part: str, whole: str) -> Callable[[Report, Outcome], Value]:
    def of(_: Report, outcome: Outcome) -> Value:
        counts = outcome.measured.counts
        return _ratio(100 * counts[part], counts[whole])

    return of


def _busy(report: Report, outcome: Outcome) -> Value:
    measured = outcome.measured
    return _ratio(100 * measured.busy, measured.ended * report.cluster.replicas)


def _batch(_: Report, outcome: Outcome) -> Value:
    return _ratio(outcome.measured.counts["sequences"], outcome.measured.counts["steps"])


def _percentile(key: str, percentile: float) -> Callable[[Report, Outcome], Value]:
    def of(_: Report, outcome: Outcome) -> Value:
        values = getattr(outcome.measured, key)
        values = values[~np.isnan(values)]
        return float(np.percentile(values, percentile)) if len(values) else None

    return of


RATES = (
    Metric("output_tokens_per_second", "output tokens/s", "{:,.1f}", _per_second("output_tokens")),
    Metric("requests_per_second", "requests/s", "{:,.3f}", _per_second("finished")),
    Metric("busy", "time in steps, %", "{:.1f}", _busy),
    Metric("sequences_per_step", "sequences per step", "{:.1f}", _batch),
)
LATENCIES = tuple(
    Metric(f"{key}_p{percentile}", f"{name} p{percentile}, s", form, _percentile(key, percentile))
    for key, name, form in (
        ("ttft", "TTFT", "{:,.3f}"),
        ("tpot", "TPOT", "{:,.4f}"),
        ("e2e", "end to end", "{:,.3f}"),
        ("queued", "in the queue", "{:,.3f}"),
    )
    for percentile in PERCENTILES
)
WORK = (
    Metric("preemptions", "preemptions", "{:,}", lambda _, o: o.measured.counts["preemptions"]),
    Metric(
        "recomputed_share",
        "computed again, %",
        "{:.2f}",
        _share("recomputed_tokens", "computed_tokens"),
    ),
    Metric(
        "cached_share", "prompt from cache, %", "{:.2f}", _share("cached_tokens", "prompt_tokens")
    ),
    Metric(
        "rejected_share",
        "refused, %",
        "{:.2f}",
        lambda report, o: 100 * o.measured.rejected.total() / len(report.load),
    ),
)
FAIRNESS = (
    Metric("service_gap", "gap between tenants, %", "{:.1f}", lambda _, o: service_gap(o)),
    Metric(
        "tenant_ttft_ratio",
        "TTFT p99, worst / best tenant",
        "{:.2f}",
        lambda report, o: _worst_tenant(report, o),
    ),
)
GOODPUT = (
    Metric(
        "goodput_share",
        "within the SLO, %",
        "{:.2f}",
        lambda report, o: 100 * _good(o, report.slo) / len(report.load),
    ),
    Metric(
        "goodput",
        "requests/s within the SLO",
        "{:,.3f}",
        lambda report, o: _ratio(_good(o, report.slo), o.measured.ended),
    ),
)


def service_gap(outcome: Outcome) -> float | None:
    """How unlike tenants were served who had requests waiting all the time: of each window, what
    the most served had more than the least, in percent of their mean. The mean over windows; None
    if there were none with two such tenants."""
    gaps = []
    for window, tenants in outcome.measured.backlogged.items():
        if len(tenants) > 1:
            by_tenant = outcome.measured.service.get(window, Counter())
            served = [by_tenant[tenant] for tenant in tenants]
            if sum(served):
                gaps.append((max(served) - min(served)) / (sum(served) / len(served)))
    return 100 * float(np.mean(gaps)) if gaps else None


def notes(report: Report) -> Iterator[str]:
    """What one has to know to read the table."""
    load, cluster, first = report.load, report.cluster, report.outcomes[0]
    outputs, prompts = load.rows["output_tokens"], load.prompt_tokens
    arriving = "all at once" if load.rate is None else f"{load.rate:,.3g} per second"
    yield (
        f"Load: {counted(len(load), 'request')}, {arriving}; prompts of {prompts.mean():,.0f} and "
        f"outputs of {outputs.mean():,.0f} tokens on average ({load.source}); "
        f"{counted(len(load.tenants), 'tenant')}, "
        f"{counted(len(load.prefixes), 'shared prefix', 'shared prefixes')}."
    )
    routed = f", {cluster.routing}" if cluster.replicas > 1 else ""
    limits = first.settings.limits
    yield (
        f"{counted(cluster.replicas, 'replica')}{routed}; "
        f"{counted(first.settings.num_blocks, 'block')} of {counted(limits.block_size, 'token')}, "
        f"{counted(limits.max_num_seqs, 'seat')}, "
        f"{counted(limits.max_num_batched_tokens, 'token')} per step, in the first."
    )
    yield (
        f"Times are simulated, by the costs of {report.profile}. The first took "
        f"{first.measured.ended:,.0f} simulated and {first.took:,.0f} real seconds."
    )
    if len(load.tenants) > 1:
        yield (
            "Gap between tenants: of those with requests waiting through a whole window of "
            f"{cluster.window:g} s, how much more the most served got than the least, in percent "
            "of their mean; output tokens count twice."
        )
    if any(outcome.measured.rejected for outcome in report.outcomes):
        yield "Refused: server.max_waiting requests were waiting already; null is for no limit."
    if any(outcome.measured.counts["swapped_blocks"] for outcome in report.outcomes):
        yield (
            "Blocks were swapped, which takes no time in simulations: preemptions look too cheap. "
            "scheduler.preemption_mode recompute counts what they cost."
        )


def as_json(report: Report) -> dict[str, Any]:
    """Every number, by what the rows call it."""
    return {
        "load": {
            "source": report.load.source,
            "requests": len(report.load),
            "rate": report.load.rate,
            "tenants": len(report.load.tenants),
        },
        "cluster": asdict(report.cluster),
        "profile": report.profile,
        "slo": dict(report.slo),
        "rows": [row.as_json(report.names) for row in report.rows],
        "outcomes": {
            outcome.settings.name: {
                "policy": outcome.settings.policy.name,
                "counts": dict(outcome.measured.counts),
                "refused": dict(outcome.measured.rejected),
                "simulated_seconds": outcome.measured.ended,
                "real_seconds": outcome.took,
                "ttft_p99_by_tenant": _by_tenant(outcome, report.load.tenants),
            }
            for outcome in report.outcomes
        },
    }


def _row(metric: Metric, values: Sequence[Value]) -> Row:
    first = values[0]
    ratios = [
        Ratio(value / first, value / first, value / first, 1, None) if value and first else None
        for value in values[1:]
    ]
    return Row(metric.key, metric.name, metric.form, values, ratios)


def _good(outcome: Outcome, slo: Mapping[str, float]) -> int:
    """Requests within all limits. One of a single token has no TPOT to keep."""
    kept = np.ones(len(outcome.measured.e2e), dtype=bool)
    for name, limit in slo.items():
        kept &= ~(getattr(outcome.measured, name) > limit)
    return int(kept.sum())


def _by_tenant(outcome: Outcome, tenants: Sequence[str]) -> dict[str, float]:
    measured = outcome.measured
    return {
        name: float(np.percentile(measured.ttft[measured.tenant == number], 99))
        for number, name in enumerate(tenants)
        if (measured.tenant == number).any()
    }


def _worst_tenant(report: Report, outcome: Outcome) -> Value:
    times = list(_by_tenant(outcome, report.load.tenants).values())
    return _ratio(max(times), min(times)) if times else None


def _ratio(value: float, by: float) -> Value:
    return value / by if by else None
