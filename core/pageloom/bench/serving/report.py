"""What a comparison came to: a table to read, and everything it was computed from as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pageloom.bench.machine import Machine
from pageloom.bench.serving.compare import Round, Side
from pageloom.bench.serving.replay import Replay
from pageloom.bench.serving.trace import Trace, TraceRequest
from pageloom.bench.statistics import (
    CONFIDENCE,
    MIN_ROUNDS,
    Ratio,
    median_of_percentiles,
    paired_ratio,
    show_ratio,
)
from pageloom.engine.stats import EngineStats

PERCENTILES = (50, 90, 99)


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
class Row:
    """A metric of every side, and its ratio to the first side."""

    metric: Metric
    values: list[float | None]  # one per side, the median over rounds
    ratios: list[Ratio | None]  # one per side after the first


@dataclass(frozen=True)
class Comparison:
    """All rounds of a run; the first side is the baseline."""

    sides: Sequence[Side]
    trace: Trace
    rounds: Sequence[Round]
    machine: Machine

    def replays(self, side: Side) -> list[Replay]:
        return [done[side.name] for done in self.rounds]

    @cached_property
    def rows(self) -> list[Row]:
        return [self._row(metric) for metric in METRICS]

    def _row(self, metric: Metric) -> Row:
        baseline, *others = (metric.over(self.replays(side)) for side in self.sides)
        if not len(baseline[0]):
            return Row(metric, [None] * len(self.sides), [None] * len(others))
        values: list[float | None] = [
            median_of_percentiles(one, metric.percentile) for one in (baseline, *others)
        ]
        ratios = [
            paired_ratio(one, baseline, metric.percentile) if metric.compared else None
            for one in others
        ]
        return Row(metric, values, ratios)


def table(comparison: Comparison) -> list[list[str]]:
    """Cells, the header first: the metric, every side, and behind each but the first its ratio."""
    baseline, *others = comparison.sides
    header = ["", baseline.name]
    for side in others:
        header += [side.name, f"/ {baseline.name}"]
    return [header, *(_cells(row) for row in comparison.rows)]


def _cells(row: Row) -> list[str]:
    shown = ["none" if v is None else row.metric.form.format(v) for v in row.values]
    cells = [row.metric.name, shown[0]]
    for value, ratio in zip(shown[1:], row.ratios, strict=True):
        cells += [value, show_ratio(ratio)]
    return cells


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
            f"{size:,.1f} MiB, {info.num_blocks:,} blocks of {info.block_size} tokens, "
            f"max_model_len {info.max_model_len}."
        )
    yield from _how_to_read(len(comparison.rounds), comparison.sides)
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
    if rounds >= MIN_ROUNDS:
        yield f"In brackets: {CONFIDENCE:.0%} bootstrap intervals, over rounds and requests."
    elif several:
        yield (
            f"In parentheses: the least and the greatest ratio of a round. {rounds} rounds are too "
            f"few for a {CONFIDENCE:.0%} interval; --rounds {MIN_ROUNDS} or more gives one."
        )
    else:
        yield f"One round shows no spread; --rounds {MIN_ROUNDS} or more gives intervals."


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Everything, down to each request of each turn. Times are seconds from the turn's start."""
    return {
        "machine": asdict(comparison.machine),
        "configs": {
            side.name: {
                "path": side.path,
                "config": asdict(side.config),
                "engine": asdict(side.engine.info),
            }
            for side in comparison.sides
        },
        "trace": [_request_as_json(request) for request in comparison.trace],
        "rounds": [
            {name: _replay_as_json(replay) for name, replay in done.items()}
            for done in comparison.rounds
        ],
        "summary": [_row_as_json(row, comparison.sides) for row in comparison.rows],
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


def _row_as_json(row: Row, sides: Sequence[Side]) -> dict[str, Any]:
    names = [side.name for side in sides]
    return {
        "metric": row.metric.key,
        "values": dict(zip(names, row.values, strict=True)),
        "ratios": {
            name: asdict(ratio)
            for name, ratio in zip(names[1:], row.ratios, strict=True)
            if ratio is not None
        },
    }


def as_markdown(comparison: Comparison) -> str:
    header, *rows = table(comparison)
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    body = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return body + "\n\n" + "".join(f"- {note}\n" for note in notes(comparison))
