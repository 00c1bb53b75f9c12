"""What a comparison came to: a table to read, and everything it was computed from as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pageloom.bench.comparison import PERCENTILES, Row, header, spread_note
from pageloom.bench.machine import Machine
from pageloom.bench.serving.compare import Round, Side
from pageloom.bench.serving.quality import Quality
from pageloom.bench.serving.replay import Replay
from pageloom.bench.serving.trace import Trace, TraceRequest
from pageloom.bench.statistics import CONFIDENCE, Ratio, median_of_percentiles, paired_ratio
from pageloom.engine.stats import EngineStats


@dataclass(frozen=True)
class Metric:
    key: str  # in JSON
    name: str
    form: str  # of a value, for `str.format`
    values: Callable[[Replay], Sequence[float]]  # one per request, or one of the whole replay
    percentile: float = 50
    compared: bool = True  # whether a ratio says something

    def over(self, replays: Sequence[Replay]) -> list[Sequence[float]]:
        """``[rounds][requests]``."""
        return [self.values(replay) for replay in replays]

    def row(self, values: Sequence[float | None], ratios: Sequence[Ratio | None]) -> Row:
        return Row(self.key, self.name, self.form, values, ratios)


def _ttft(replay: Replay) -> list[float]:
    return [request.ttft for request in replay.requests]


def _tpot(replay: Replay) -> list[float]:
    return [tpot for request in replay.requests if (tpot := request.tpot) is not None]


def _uncompared(
    key: str, name: str, form: str, of: Callable[[EngineStats], float | None]
) -> Metric:
    return Metric(key, name, form, lambda replay: [of(replay.stats) or 0], compared=False)


METRICS = (
    Metric(
        "output_tokens_per_second", "output tokens/s", "{:.1f}", lambda r: [r.tokens_per_second]
    ),
    *(Metric(f"ttft_p{p}", f"TTFT p{p}, s", "{:.3f}", _ttft, p) for p in PERCENTILES),
    *(Metric(f"tpot_p{p}", f"TPOT p{p}, s", "{:.4f}", _tpot, p) for p in PERCENTILES),
    Metric("peak_running", "running, peak", "{:.0f}", lambda r: [r.stats.peak_running]),
    Metric("mean_running", "running, mean", "{:.1f}", lambda r: [r.stats.mean_running or 0]),
    _uncompared("kv_utilization", "KV utilization", "{:.1%}", lambda s: s.kv_utilization),
    _uncompared("peak_blocks", "KV blocks, peak", "{:.0f}", lambda s: s.peak_blocks),
    _uncompared("preemptions", "preemptions", "{:.0f}", lambda s: s.preemptions),
    _uncompared("recomputed_share", "recomputed tokens", "{:.1%}", lambda s: s.recomputed_share),
    _uncompared("cached_share", "prefix cache hits", "{:.1%}", lambda s: s.cached_share),
)


@dataclass(frozen=True)
class Comparison:
    """All rounds of a run; the first side is the baseline."""

    sides: Sequence[Side]
    trace: Trace
    rounds: Sequence[Round]
    machine: Machine
    quality: Quality | None = None

    def replays(self, side: Side) -> list[Replay]:
        return [done[side.name] for done in self.rounds]

    @cached_property
    def rows(self) -> list[Row]:
        return [self._row(metric) for metric in METRICS]

    def _row(self, metric: Metric) -> Row:
        baseline, *others = (metric.over(self.replays(side)) for side in self.sides)
        if not len(baseline[0]):
            return metric.row([None] * len(self.sides), [None] * len(others))
        values: list[float | None] = [
            median_of_percentiles(one, metric.percentile) for one in (baseline, *others)
        ]
        ratios = [
            paired_ratio(one, baseline, metric.percentile) if metric.compared else None
            for one in others
        ]
        return metric.row(values, ratios)


def table(comparison: Comparison) -> list[list[str]]:
    """Cells, the header first."""
    rows = [row.cells() for row in comparison.rows]
    if comparison.quality is not None:
        rows += _quality_cells(comparison.quality)
    return [header([side.name for side in comparison.sides]), *rows]


def _quality_cells(quality: Quality) -> Iterator[list[str]]:
    first, *others = quality.perplexity.values()
    perplexities = ["perplexity", f"{first:.3f}"]
    for value, ratio in zip(others, quality.perplexity_ratio.values(), strict=True):
        shown_ratio = f"{ratio.value:.4f} [{ratio.low:.4f}, {ratio.high:.4f}]"
        perplexities += [f"{value:.3f}", shown_ratio]
    yield perplexities
    if others:
        _, *divergences = quality.kl_divergence.values()
        shown = [cell for value in divergences for cell in (f"{value:.5f}", "")]
        yield ["KL from baseline, nats/token", "", *shown]


def notes(comparison: Comparison) -> Iterator[str]:
    """What one has to know to read the table, one sentence or two each."""
    trace = comparison.trace
    prompts = [len(request.prompt) for request in trace]
    outputs = [request.output_tokens for request in trace]
    arriving = f"over {trace[-1].arrival:.1f} s" if trace[-1].arrival else "all at once"
    yield (
        f"Trace: {len(trace)} requests {arriving}, {sum(prompts):,} prompt tokens "
        f"({min(prompts)} to {max(prompts)} each), {sum(outputs):,} output tokens "
        f"({min(outputs)} to {max(outputs)}), greedy."
    )
    for side in comparison.sides:
        info = side.engine.info
        size = info.num_blocks * info.bytes_per_block / 2**20
        yield (
            f"{side.name}: {side.path}, {info.backend}, {info.policy}, {info.dtype}; KV cache "
            f"{size:,.1f} MiB of {side.engine.memory.kv_format}, {info.num_blocks:,} blocks of "
            f"{info.block_size} tokens, max_model_len {info.max_model_len}."
        )
    yield from _how_to_read(len(comparison.rounds), comparison.sides)
    if (quality := comparison.quality) is not None:
        yield (
            f"Quality: {quality.scored_tokens:,} tokens of {quality.source} were scored, in "
            f"windows of up to {quality.window} with nothing before them; less is better. This is "
            "measured once, and nothing in it depends on time. In brackets: what more such text "
            f"would give, {CONFIDENCE:.0%} intervals."
        )
    yield f"Machine: {comparison.machine}."


def _how_to_read(rounds: int, sides: Sequence[Side]) -> Iterator[str]:
    several = rounds > 1
    values = f"Values are medians over {rounds} rounds" if several else "Values are of one round"
    if len(sides) == 1:
        yield f"{values}."
        return
    ratios = "the median of the rounds' ratios to" if several else "the ratio to"
    yield (
        f"{values}; behind each config, {ratios} {sides[0].name}: above 1 it has more of it, which "
        "is worse for TTFT and TPOT."
    )
    yield spread_note(rounds)


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, down to each request of each turn. Times are seconds from the turn's start."""
    return {
        "machine": asdict(comparison.machine),
        "configs": {
            side.name: {
                "path": side.path,
                "config": side.config.shown(),
                "engine": asdict(side.engine.info),
                "memory": asdict(side.engine.memory),
            }
            for side in comparison.sides
        },
        "trace": [_request_as_json(request) for request in comparison.trace],
        "rounds": [
            {name: _replay_as_json(replay) for name, replay in done.items()}
            for done in comparison.rounds
        ],
        "quality": None if comparison.quality is None else asdict(comparison.quality),
        "summary": [
            row.as_json([side.name for side in comparison.sides]) for row in comparison.rows
        ],
    }


def _request_as_json(request: TraceRequest) -> dict[str, Any]:
    return {
        "prompt_tokens": len(request.prompt),
        "output_tokens": request.output_tokens,
        "arrival": request.arrival,
        "user": request.user,
        "priority": request.priority,
    }


def _replay_as_json(replay: Replay) -> dict[str, Any]:
    return {
        "seconds": replay.seconds,
        "steps": replay.stats.steps,
        "busy_seconds": replay.stats.busy,
        **{
            metric.key: float(np.percentile(values, metric.percentile))
            for metric in METRICS
            if len(values := metric.values(replay))
        },
        "requests": [
            {**asdict(request), "ttft": request.ttft, "tpot": request.tpot}
            for request in replay.requests
        ],
    }


def as_markdown(comparison: Comparison) -> str:
    names, *rows = table(comparison)
    lines = [names, ["---", *["---:"] * (len(names) - 1)], *rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return body + "\n\n" + "".join(f"- {note}\n" for note in notes(comparison))
