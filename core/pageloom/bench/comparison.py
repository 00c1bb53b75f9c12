"""A table of several sides, of which the first is the baseline, as every comparison shows it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pageloom.bench.statistics import CONFIDENCE, MIN_ROUNDS, Ratio, show_ratio

PERCENTILES = (50, 90, 99)  # that latencies are shown at


@dataclass(frozen=True)
class Row:
    """A metric of every side, and its ratio to the first side."""

    key: str  # in JSON
    name: str
    form: str  # of a value, for `str.format`
    values: Sequence[float | None]  # one per side, the median over rounds
    ratios: Sequence[Ratio | None]  # one per side after the first

    def cells(self) -> list[str]:
        """As `header` says."""
        shown = ["none" if v is None else self.form.format(v) for v in self.values]
        cells = [self.name, shown[0]]
        for value, ratio in zip(shown[1:], self.ratios, strict=True):
            cells += [value, show_ratio(ratio)]
        return cells

    def as_json(self, sides: Sequence[str]) -> dict[str, Any]:
        return {
            "metric": self.key,
            "values": dict(zip(sides, self.values, strict=True)),
            "ratios": {
                side: asdict(ratio)
                for side, ratio in zip(sides[1:], self.ratios, strict=True)
                if ratio is not None
            },
        }


def header(sides: Sequence[str]) -> list[str]:
    """The metric, every side by its name, and behind each but the first its ratio."""
    baseline, *others = sides
    cells = ["", baseline]
    for side in others:
        cells += [side, f"/ {baseline}"]
    return cells


def spread_note(rounds: int) -> str:
    """What stands behind a ratio that `show_ratio` has written."""
    if rounds >= MIN_ROUNDS:
        return f"In brackets: {CONFIDENCE:.0%} bootstrap intervals, over rounds and requests."
    if rounds > 1:
        return (
            f"In parentheses: the least and the greatest ratio of a round. {rounds} rounds are too "
            f"few for a {CONFIDENCE:.0%} interval; --rounds {MIN_ROUNDS} or more gives one."
        )
    return f"One round shows no spread; --rounds {MIN_ROUNDS} or more gives intervals."
