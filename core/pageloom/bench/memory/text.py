"""The report as rows of text, which the terminal and the page share."""

from __future__ import annotations

from pageloom.bench.memory.report import Report, Row
from pageloom.bench.memory.served import KV_SLOTS, LLAMA_13B, OPT_13B
from pageloom.bench.workload import RecordedLengths

HEADER = ("", "paper", "here", "difference", "why")


def numbered(report: Report) -> dict[str, int]:
    """The reasons that the report gives, numbered from 1; many rows have the same."""
    reasons: dict[str, int] = {}
    for row in report.rows:
        for reason in row.reasons:
            reasons.setdefault(reason, len(reasons) + 1)
    return reasons


def cells(row: Row, reasons: dict[str, int]) -> tuple[str, ...]:
    """One text per column of `HEADER`; the last are the numbers of the reasons."""
    ours = _number(row, row.ours)
    if row.error is not None:
        ours += f" ± {row.error:.1f}"
    published = difference = ""
    if row.paper is not None:
        published = _number(row, row.paper)
        change = row.ours - row.paper
        difference = (
            f"{change:+.1f} points" if row.unit == "percent" else f"{change / row.paper:+.0%}"
        )
    why = ", ".join(str(reasons[reason]) for reason in row.reasons)
    return row.label, published, ours, difference, why


def notes(report: Report) -> list[str]:
    """What the numbers were measured with, and what in them is not a result."""
    settings = report.settings
    recorded = [n for n, s in report.results.sources.items() if isinstance(s, RecordedLengths)]
    return [
        f"Paged is this engine's planner: policy {settings.policy.name}, block size "
        f"{settings.block_size}, at most {settings.max_num_seqs} sequences and "
        f"{settings.max_num_batched_tokens} tokens per step, chunked prefill "
        f"{'on' if settings.enable_chunked_prefill else 'off'}, preemption "
        f"{settings.preemption_mode}. Seed {settings.seed}.",
        f"KV memory is 12 GiB of a 40 GB card. {OPT_13B.name} and {LLAMA_13B.name} are alike: "
        f"{OPT_13B.kv_bytes_per_token // 1024} KiB per token, room for {KV_SLOTS:,}.",
        f"Lengths: recorded for {', '.join(recorded) or 'no workload'}, otherwise log-normal with "
        "the paper's means. The spread of ShareGPT's outputs is what makes Orca (Max) reserve what "
        "it does in the paper, and the time of a step contains one constant that makes Paged batch "
        "132.44 requests of Alpaca: these two are not results.",
        "± is the standard error over time. docs/memory.md has the rest.",
    ]


def _number(row: Row, value: float) -> str:
    return f"{value:.1f} %" if row.unit == "percent" else f"{value:.2f}"
