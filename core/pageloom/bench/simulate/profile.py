"""A profile: what was fitted, and all that one may want to know of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pageloom.bench.machine import Machine
from pageloom.bench.simulate.fit import Fit, Fitted
from pageloom.bench.simulate.measure import worker_report
from pageloom.contract.costs import StepProfile
from pageloom.engine.engine import Engine
from pageloom.errors import counted

HEADER = ["decodes", "context", "chunk", "context", "ms", "spread", "fit", "unseen"]


def make_profile(engine: Engine, fitted: Fit, machine: Machine) -> StepProfile:
    limits = engine.planner.limits
    measured = {
        "machine": asdict(machine),
        "model": Path(engine.info.model).name,
        "quantizer": engine.info.quantizer,
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "errors": errors(fitted),
        "steps": [_as_json(step) for step in fitted.steps],
    }
    return StepProfile(fitted.costs, worker_report(engine), measured)


def errors(fitted: Fit) -> dict[str, float]:
    """Relative, without signs: of the steps that the costs were fitted to, and of each as told
    from all others."""
    return {
        f"{kind}_p{percentile}": fitted.error(percentile, unseen)
        for kind, unseen in (("fit", False), ("unseen", True))
        for percentile in (50, 90, 100)
    }


def cells(step: Fitted) -> list[str]:
    """As `HEADER` says."""
    point = step.point
    return [
        str(point.decodes),
        str(point.context) if point.decodes else "",
        str(point.chunk) if point.chunk else "",
        str(point.chunk_context) if point.chunk else "",
        f"{1000 * step.measured:.2f}",
        f"{step.most / step.least:.2f}",
        f"{step.error:+.1%}",
        f"{step.unseen_error:+.1%}",
    ]


def notes(fitted: Fit) -> Iterator[str]:
    """What one has to know to read the table."""
    samples = sum(step.samples for step in fitted.steps)
    yield (
        f"{counted(len(fitted.steps), 'kind')} of steps, {samples} measured. ms is the median, "
        "spread the longest by the shortest; fit is what the costs are off by, and unseen what "
        "those are off by that were fitted to all other kinds."
    )
    found = errors(fitted)
    yield (
        f"Relative error: median {found['fit_p50']:.1%}, 90th percentile {found['fit_p90']:.1%}; "
        f"unseen: median {found['unseen_p50']:.1%}, 90th percentile {found['unseen_p90']:.1%}."
    )


def _as_json(step: Fitted) -> dict[str, Any]:
    return {
        **step.point.as_json(),
        "seconds": step.measured,
        "least": step.least,
        "most": step.most,
        "samples": step.samples,
        "predicted": step.predicted,
        "unseen": step.unseen,
    }
