"""The paper's numbers beside ours, and why they differ where they do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from pageloom import __version__
from pageloom.bench.memory import paper
from pageloom.bench.memory.experiments import OVERLOAD, Results, Sharing
from pageloom.bench.memory.reasons import Reasons
from pageloom.bench.memory.served import KV_SLOTS, OPT_13B
from pageloom.bench.memory.settings import Settings
from pageloom.bench.workload import RecordedLengths

Unit = Literal["percent", "requests"]

LIMIT_PERCENT = 3.0  # points
LIMIT_REQUESTS = 0.1  # of the paper's number

PARTS = {
    "token_states": "token states",
    "reserved": "reserved",
    "internal": "internal fragmentation",
    "external_and_others": "external fragmentation and others",
}


@dataclass(frozen=True, slots=True)
class Row:
    figure: str
    label: str
    unit: Unit
    ours: float
    paper: float | None = None
    error: float | None = None  # standard error of ours
    reasons: Sequence[str] = ()  # why it differs from the paper, if it does: sentences

    @property
    def differs(self) -> bool:
        """Whether the difference from the paper is one that needs a reason."""
        return self.paper is not None and abs(self.ours - self.paper) > _limit(
            self.unit, self.paper
        )


@dataclass(frozen=True, slots=True)
class Report:
    settings: Settings
    results: Results
    rows: Sequence[Row]


def make_report(settings: Settings, results: Results) -> Report:
    reasons = Reasons(settings, results)
    rows = [*_memory(results, reasons), *_batched(results, reasons), *_saved(results, reasons)]
    return Report(settings, results, [*rows, *_block_sizes(results)])


def _memory(results: Results, reasons: Reasons) -> Iterator[Row]:
    for system in paper.SYSTEMS:
        measured = results.serving[paper.SHAREGPT, system]
        for part, name in PARTS.items():
            share = measured.shares[part]
            published = paper.MEMORY[system].get(part)
            if published is None and not share.mean:
                continue  # a part that such a system does not have
            yield _row(
                "Figure 2: KV memory, ShareGPT",
                f"{system}, {name}",
                "percent",
                100 * share.mean,
                published,
                error=100 * share.error,
                reasons=reasons.memory(system),
            )


def _batched(results: Results, reasons: Reasons) -> Iterator[Row]:
    for workload, rate in paper.REQUEST_RATES.items():
        for system in paper.SYSTEMS:
            requests = results.serving[workload, system].requests
            yield _row(
                f"Figure 13: batched requests, {workload} at {rate:g} requests/s",
                system,
                "requests",
                requests.mean,
                paper.BATCHED[workload][system],
                error=requests.error,
                reasons=reasons.batched(workload, system),
            )


def _saved(results: Results, reasons: Reasons) -> Iterator[Row]:
    for (workload, method), published in paper.SAVED.items():
        for width in paper.WIDTHS:
            key = Sharing(workload, method, width)
            where = "Figure 15" if workload == paper.ALPACA else "Section 6.3"
            yield _row(
                f"{where}: blocks saved by sharing, {workload}",
                f"{method}, {width}",
                "percent",
                100 * results.saved[key].of_blocks,
                published.get(width),
                reasons=reasons.saved(key),
            )


def _block_sizes(results: Results) -> Iterator[Row]:
    for (workload, size), measured in results.block_sizes.items():
        rate = paper.REQUEST_RATES[workload] * OVERLOAD
        share, waste = measured.shares["token_states"], measured.shares["internal"]
        yield Row(
            f"Section 7.2: token states by block size, {workload} at {rate:g} requests/s",
            f"{size}; {waste.mean:.1%} wasted in last blocks",
            "percent",
            100 * share.mean,
            error=100 * share.error,
        )


def _row(
    figure: str,
    label: str,
    unit: Unit,
    ours: float,
    published: float | None,
    *,
    reasons: list[str],
    error: float | None = None,
) -> Row:
    row = Row(figure, label, unit, ours, published, error)
    if published is None or not row.differs:
        return row
    beyond = abs(ours - published) - _limit(unit, published)
    if error is not None and beyond < 2 * error:
        reasons = ["It is less than two standard errors beyond the limit.", *reasons]
    return replace(row, reasons=reasons)


def _limit(unit: Unit, published: float) -> float:
    return LIMIT_PERCENT if unit == "percent" else LIMIT_REQUESTS * published


def as_json(report: Report) -> dict[str, Any]:
    """Everything that was measured, and with what."""
    settings, results = report.settings, report.results
    return {
        "pageloom": __version__,
        "paper": paper.CITATION,
        "settings": {
            "policy": settings.policy.name,
            "options": asdict(settings.policy.options),
            "max_num_seqs": settings.max_num_seqs,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "enable_chunked_prefill": settings.enable_chunked_prefill,
            "block_size": settings.block_size,
            "preemption_mode": settings.preemption_mode,
            "swap_bytes": settings.swap_bytes,
            "seed": settings.seed,
            "kv_slots": KV_SLOTS,
            "kv_bytes_per_token": OPT_13B.kv_bytes_per_token,
        },
        "lengths": {
            name: f"{len(source.recorded)} recorded"
            if isinstance(source, RecordedLengths)
            else repr(source)
            for name, source in results.sources.items()
        },
        "rows": [asdict(row) for row in report.rows],
        "serving": [
            {"workload": workload, "system": system, **asdict(measured)}
            for (workload, system), measured in results.serving.items()
        ],
        "sharing": [{**key._asdict(), **saved._asdict()} for key, saved in results.saved.items()],
        "block_sizes": [
            {"workload": workload, "block_size": size, **asdict(measured)}
            for (workload, size), measured in results.block_sizes.items()
        ],
    }
