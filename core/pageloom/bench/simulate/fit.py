"""From measured steps to costs: a least-squares fit in which nothing takes less than no time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from pageloom.bench.simulate.points import Point
from pageloom.contract.costs import StepCosts, StepWork

Array = NDArray[np.float64]

LINEAR = ("sequences", "draws", "decode_context", "prefill_context", "prefill_pairs")


@dataclass(frozen=True, slots=True)
class Fitted:
    """A kind of step, as it was measured and as the costs have it. Times are seconds."""

    point: Point
    measured: float  # median
    least: float
    most: float
    samples: int
    predicted: float
    unseen: float
    """As costs have it that were fitted to all other kinds of steps."""

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def unseen_error(self) -> float:
        return self.unseen / self.measured - 1


@dataclass(frozen=True)
class Fit:
    costs: StepCosts
    steps: Sequence[Fitted]

    def error(self, percentile: float, unseen: bool = False) -> float:
        """Of the relative errors of all kinds of steps, without their signs."""
        errors = [abs(s.unseen_error if unseen else s.error) for s in self.steps]
        return float(np.percentile(errors, percentile))


def fit(timings: Mapping[Point, Sequence[float]]) -> Fit:
    """Costs whose relative errors are least, squared and summed over the kinds of steps."""
    kinds = list(timings)
    works = [point.work() for point in kinds]
    medians = np.array([float(np.median(timings[point])) for point in kinds])
    costs = fit_costs(works, medians)
    steps = []
    for index, point in enumerate(kinds):
        others = [work for other, work in enumerate(works) if other != index]
        unseen = fit_costs(others, np.delete(medians, index))
        steps.append(
            Fitted(
                point,
                float(medians[index]),
                min(timings[point]),
                max(timings[point]),
                len(timings[point]),
                costs.seconds(works[index]),
                unseen.seconds(works[index]),
            )
        )
    return Fit(costs, steps)


def fit_costs(works: Sequence[StepWork], seconds: Array) -> StepCosts:
    """``seconds`` is ``[N]``, above 0, one for each of ``works``."""
    knots = _knots([work.tokens for work in works])
    rows = [
        [1.0, *_ramps(work.tokens, knots), *(getattr(work, name) for name in LINEAR)]
        for work in works
    ]
    matrix = np.array(rows) / seconds[:, None]
    scale = matrix.max(axis=0)
    scale[scale == 0] = 1.0
    found = (non_negative(matrix / scale, np.ones(len(works))) / scale).tolist()
    slopes, linear = found[1 : len(knots)], found[len(knots) :]
    reached = np.concatenate([[0.0], np.cumsum(slopes * np.diff(knots))])
    names = (name.removesuffix("s") for name in LINEAR)
    return StepCosts(
        constant=found[0],
        tokens=tuple(zip(knots, reached.tolist(), strict=True)),
        **dict(zip(names, linear, strict=True)),
    )


def _knots(counts: Sequence[int]) -> list[int]:
    """Numbers of tokens between which a step's cost is a straight line: powers of two, each with
    something measured above the one before."""
    knots, most = [min(counts)], max(counts)
    power = 2
    while knots[-1] < most:
        knot = min(power, most)
        if any(knots[-1] < count <= knot for count in counts):
            knots.append(knot)
        power *= 2
    return knots if len(knots) > 1 else [knots[0], knots[0] + 1]


def _ramps(count: int, knots: Sequence[int]) -> list[float]:
    """How much of ``count`` lies between each two knots."""
    return [float(min(max(count - low, 0), high - low)) for low, high in pairwise(knots)]


def non_negative(matrix: Array, target: Array) -> Array:
    """The x of 0 or more, ``[K]``, for which ``matrix @ x``, of ``[N, K]``, is nearest to
    ``target``: the active set method of Lawson and Hanson, "Solving Least Squares Problems" (1974),
    chapter 23."""
    columns = matrix.shape[1]
    x = np.zeros(columns)
    free = np.zeros(columns, dtype=bool)
    tolerance = 1e-10 * float(np.abs(matrix).sum() + 1)
    for _ in range(30 * columns):
        gradient = matrix.T @ (target - matrix @ x)
        gradient[free] = -np.inf
        if free.all() or gradient.max() <= tolerance:
            break
        free[int(gradient.argmax())] = True
        while True:
            solution = np.zeros(columns)
            solution[free] = np.linalg.lstsq(matrix[:, free], target, rcond=None)[0]
            negative = free & (solution <= 0)
            if not negative.any():
                x = solution
                break
            # As far towards the solution as nothing falls below 0.
            step = float((x[negative] / (x[negative] - solution[negative] + 1e-300)).min())
            x = x + step * (solution - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return x
