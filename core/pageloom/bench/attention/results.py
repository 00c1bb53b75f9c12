"""What a run came to, and its JSON: pytest-benchmark's own format, with more in ``extra_info``.

A report is made from the JSON alone, so that a run of yesterday is read like one of today.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pageloom.bench.attention.matrix import Case
from pageloom.bench.attention.rounds import CaseResult, Measured
from pageloom.bench.machine import Machine
from pageloom.errors import PageloomError

TEST = "benchmarks/test_attention.py::test_attention"
KEY = "pageloom"  # of what pytest-benchmark's format has no place for

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Entry:
    """One backend in one case. Arrays have a number for each round."""

    case: Case
    backend: str
    package: str
    is_peer: bool
    layers: int  # measured
    kv_bytes: float  # of K and V, read once by one layer of the step
    flop: float  # of one layer of the step
    error: float
    graph: bool
    plan: Array  # seconds per step
    forward: Array  # seconds per step, all layers that were measured
    read: Array  # the machine, bytes per second
    copy: Array
    matrix: Array  # FLOP per second

    @property
    def seconds(self) -> Array:
        """Per layer, with its share of `plan`, which is called once for all layers of a model."""
        return per_layer(self.case, self.layers, self.plan, self.forward)

    @property
    def bandwidth(self) -> Array:
        """Bytes of K and V per second, planning aside."""
        return self.kv_bytes * self.layers / self.forward

    @property
    def rate(self) -> Array:
        """FLOP per second, planning aside."""
        return self.flop * self.layers / self.forward

    @property
    def roofline(self) -> Array:
        """The least seconds per layer that the machine's bandwidth and matrix rate allow
        (Williams et al. 2009, "Roofline", CACM 52(4))."""
        bound: Array = np.maximum(self.kv_bytes / self.read, self.flop / self.matrix)
        return bound


@dataclass(frozen=True, slots=True)
class Absence:
    """A backend without a number in a case."""

    case: str  # its id
    backend: str
    reason: str


@dataclass(frozen=True)
class Run:
    entries: list[Entry]
    refused: list[Absence]
    failed: list[Absence]
    machine: str  # "" in what pytest wrote
    datetime: str

    @property
    def cases(self) -> list[Case]:
        return list(dict.fromkeys(entry.case for entry in self.entries))


def per_layer(case: Case, layers: int, plan: Array, forward: Array) -> Array:
    seconds: Array = plan / case.layers + forward / layers
    return seconds


def extra_info(result: CaseResult, measured: Measured) -> dict[str, Any]:
    """Everything that the report needs to know of one backend in one case."""
    case = result.case
    return {
        "case": asdict(case),
        "backend": measured.candidate.name,
        "package": measured.candidate.package,
        "is_peer": measured.candidate.is_peer,
        "layers": result.layers,
        "kv_bytes": result.kv_bytes,
        "flop": case.flop,
        "error": measured.error,
        "graph": measured.graph,
        "plan": measured.plan,
        "forward": measured.forward,
        "read": result.read,
        "copy": result.copy,
        "matrix": result.matrix,
    }


def seconds_of(result: CaseResult, measured: Measured) -> list[float]:
    """What pytest-benchmark is given: see `Entry.seconds`."""
    plan, forward = np.asarray(measured.plan), np.asarray(measured.forward)
    seconds: list[float] = per_layer(result.case, result.layers, plan, forward).tolist()
    return seconds


def as_json(results: Iterable[CaseResult], machine: Machine) -> dict[str, Any]:
    """The run as pytest-benchmark would write it, so that its tools read it."""
    from pytest_benchmark.plugin import (
        pytest_benchmark_generate_json,
        pytest_benchmark_generate_machine_info,
    )
    from pytest_benchmark.utils import get_commit_info

    results = list(results)
    output: dict[str, Any] = pytest_benchmark_generate_json(
        config=None,
        benchmarks=[_metadata(result, one) for result in results for one in result.measured],
        include_data=True,
        machine_info=pytest_benchmark_generate_machine_info(),
        commit_info=get_commit_info("pageloom"),
    )
    output[KEY] = {
        "machine": {**asdict(machine), "text": str(machine)},
        "refused": _absences(results, "refused"),
        "failed": _absences(results, "failed"),
    }
    return output


def _metadata(result: CaseResult, measured: Measured) -> Any:
    """One record, as `benchmarks/test_attention.py` leaves it when pytest runs it."""
    from pytest_benchmark.stats import Metadata

    case, backend = result.case.id, measured.candidate.name
    test = f"[{case}-{backend}]"
    record = Metadata(
        SimpleNamespace(
            name="test_attention" + test,
            fullname=TEST + test,
            group=case,
            param=test[1:-1],
            params={"case": case, "backend": backend},
            extra_info=extra_info(result, measured),
            cprofile_stats=None,
            has_error=False,
        ),
        iterations=1,
        options={"timer": "perf_counter", "calls_per_sample": measured.calls},
    )
    for seconds in seconds_of(result, measured):
        record.update(seconds)
    return record


def _absences(results: Sequence[CaseResult], kind: str) -> list[dict[str, str]]:
    return [
        asdict(Absence(result.case.id, backend, reason))
        for result in results
        for backend, reason in getattr(result, kind).items()
    ]


def read_run(data: dict[str, Any]) -> Run:
    """Raises `KeyError` or `TypeError` if the data are not of `as_json` or of
    ``pytest benchmarks/test_attention.py --benchmark-json``."""
    own = data.get(KEY, {"machine": {}, "refused": [], "failed": []})
    entries = []
    for record in data["benchmarks"]:
        if record["fullname"].startswith(TEST):
            info = dict(record["extra_info"])
            arrays = {
                key: np.asarray(info[key], dtype=float)
                for key in ("plan", "forward", "read", "copy", "matrix")
            }
            entries.append(Entry(**{**info, **arrays, "case": Case(**info["case"])}))
    return Run(
        entries,
        [Absence(**one) for one in own["refused"]],
        [Absence(**one) for one in own["failed"]],
        own["machine"].get("text", ""),
        data["datetime"],
    )


def load_run(path: Path) -> Run:
    """Raises `PageloomError` for a file that holds no run."""
    try:
        run = read_run(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise PageloomError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PageloomError(
            f"{path} is not what `pageloom bench attention --json` writes: {error!r}"
        ) from error
    if not run.entries:
        raise PageloomError(f"{path} has no benchmark of attention backends in it")
    return run
