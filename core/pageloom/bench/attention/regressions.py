"""Whether a backend became slower since an earlier run.

Runs at different times find the machine in different moods, so that seconds are not compared. What
is compared is the time of a layer as a multiple of the roofline's, which the machine's own rates in
the same rounds say; what slows the whole machine down slows those too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pageloom.bench.attention.report import title
from pageloom.bench.attention.results import Entry, Run
from pageloom.bench.statistics import CONFIDENCE, MIN_ROUNDS, Ratio, show_ratio, unpaired_ratio
from pageloom.errors import PageloomError

HEADER = ("", "backend", "time / earlier", "")


@dataclass(frozen=True, slots=True)
class Change:
    entry: Entry
    ratio: Ratio  # of times, now to then
    margin: float  # by which a ratio has to leave 1 to mean something

    @property
    def is_regression(self) -> bool:
        """Whether even the lower end of the interval is slower by more than the margin."""
        return self.ratio.low > 1 + self.margin

    @property
    def verdict(self) -> str:
        if self.is_regression:
            return "slower"
        return "faster" if self.ratio.high < 1 / (1 + self.margin) else "within noise"


@dataclass(frozen=True)
class Changes:
    """Two runs compared. The earlier one lies in ``file``."""

    file: str
    earlier: Run
    changes: Sequence[Change]
    margin: float
    only_earlier: Sequence[str]  # what was timed then and is not now
    same_machine: bool

    @property
    def regressions(self) -> list[Change]:
        return [change for change in self.changes if change.is_regression]


def compare(run: Run, earlier: Run, margin: float, file: str) -> Changes:
    """Raises `PageloomError` if there is nothing to compare, or too few rounds to do it."""
    then = {(entry.case, entry.backend): entry for entry in earlier.entries}
    now = {(entry.case, entry.backend): entry for entry in run.entries}
    both = [key for key in now if key in then]
    if not both:
        raise PageloomError(f"{file} has no case and backend in common with this run")
    fewest = min(len(side[key].forward) for side in (now, then) for key in both)
    if fewest < MIN_ROUNDS:
        raise PageloomError(
            f"{file} and this run can be compared from {MIN_ROUNDS} rounds on, and one of them has "
            f"{fewest}; use --set rounds={MIN_ROUNDS} or more"
        )
    changes = [
        Change(now[key], unpaired_ratio(_relative(now[key]), _relative(then[key])), margin)
        for key in both
    ]
    missing = [f"{backend} in {case.id}" for case, backend in then if (case, backend) not in now]
    return Changes(
        file,
        earlier,
        changes,
        margin,
        missing,
        _is_same(run.machine, earlier.machine),
    )


def rows(changes: Changes) -> Iterator[tuple[str, ...]]:
    """One for each change, under `HEADER`."""
    for change in changes.changes:
        entry = change.entry
        yield title(entry.case), entry.backend, show_ratio(change.ratio), change.verdict


def change_notes(changes: Changes) -> Iterator[str]:
    yield (
        f"Compared with {changes.file} of {changes.earlier.datetime}: time per layer as a multiple "
        f"of the roofline's, now divided by then, with its {CONFIDENCE:.0%} bootstrap interval. "
        f"Slower means that all of the interval is above {1 + changes.margin:g}."
    )
    if not changes.same_machine:
        yield f"That was another machine or torch: {changes.earlier.machine}."
    if changes.only_earlier:
        yield f"Timed then, not now: {'; '.join(changes.only_earlier)}."


def _relative(entry: Entry) -> list[float]:
    relative: list[float] = (entry.seconds / entry.roofline).tolist()
    return relative


def _is_same(machine: str, other: str) -> bool:
    """Whether they may be the same machine with the same torch."""
    mine, theirs = (
        [part for part in text.split("; ") if not part.startswith("load average")]
        for text in (machine, other)
    )
    return not machine or not other or mine == theirs
