"""Time all backends of a case in turn, round after round."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pageloom.bench.attention.candidates import (
    BrokenError,
    Candidate,
    RefusedError,
    make_quantizer,
)
from pageloom.bench.attention.matrix import Case, Matrix
from pageloom.bench.attention.oracle import Oracle
from pageloom.bench.attention.rates import Rates, timed
from pageloom.bench.attention.workload import Step, Workload
from pageloom.contract import KVQuantizer
from pageloom.errors import one_line
from pageloom.plugins import Plugins
from pageloom.runner.graphs import CUDARecorder

MOST_CALLS = 1000  # in one sample
MOST_FLOP = {"cpu": 2e10, "cuda": 2e13}  # of a step, if more than one layer is measured


@dataclass
class Measured:
    """One backend in one case: samples, one per round. Times are seconds per step."""

    candidate: Candidate
    error: float  # the worst of an element, as a multiple of what the oracle allows
    graph: bool  # whether the layers ran as a CUDA graph
    calls: int  # of a step, in one sample
    plan: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)  # all layers


@dataclass
class CaseResult:
    """What became of a case. The rates, per second, are of the same rounds."""

    case: Case
    layers: int  # measured
    kv_bytes: int  # of K and V as they are stored, of one layer of the step
    measured: list[Measured] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # reasons by backend
    failed: dict[str, str] = field(default_factory=dict)
    read: list[float] = field(default_factory=list)
    copy: list[float] = field(default_factory=list)
    matrix: list[float] = field(default_factory=list)


def layers_to_measure(case: Case, device: torch.device, kv_memory: int) -> int:
    """As many layers of the model as ``kv_memory`` bytes hold the cache of: a step goes through
    the caches of all layers, and only if they are larger, together, than the processor's caches,
    they come from memory as in an engine. Fewer where a step would take seconds, for then it is
    arithmetic that takes the time. At least one."""
    by_memory = kv_memory // stored_bytes(case, None)
    by_time = int(MOST_FLOP[device.type] / case.flop)
    return max(1, min(case.layers, by_memory, by_time))


def stored_bytes(case: Case, quantizer: KVQuantizer | None) -> int:
    """Of the K and V of one layer that a step attends over."""
    item: int = getattr(torch, case.dtype).itemsize
    size = case.head_size
    vector = quantizer.bytes_per_vector(size) if quantizer else size * item
    return 2 * sum(length for _, length in case.sequences) * case.num_kv_heads * vector


@torch.inference_mode()
def run_case(
    case: Case,
    matrix: Matrix,
    candidates: Sequence[Candidate],
    plugins: Plugins,
    rates: Rates,
    say: Callable[[str], None] = lambda what: None,
) -> CaseResult:
    """Prepare every candidate, check it against the oracle, and time those that passed.

    In a round each is timed once, and another one begins.
    """
    quantizer = make_quantizer(plugins, case.quantizer)
    layers = layers_to_measure(case, rates.device, matrix.kv_memory)
    result = CaseResult(case, layers, stored_bytes(case, quantizer))
    workload = Workload(case, rates.device, layers, matrix.settings.seed)
    say("computing what is right")
    oracle = Oracle(workload, quantizer)
    ready: list[tuple[Measured, Step]] = []
    for candidate in candidates:
        say(f"preparing {candidate.name}")
        try:
            step = candidate.prepare(workload, quantizer)
            ready.append(_check_and_calibrate(candidate, step, oracle, matrix.settings.min_time))
        except RefusedError as error:
            result.refused[candidate.name] = str(error)
        except BrokenError as error:
            result.failed[candidate.name] = str(error)
    if not ready:
        return result
    matrix_rate = rates.matrix(case.dtype)
    for number in range(matrix.settings.rounds):
        say(f"round {number + 1} of {matrix.settings.rounds}")
        with _no_garbage_collection():
            result.read.append(rates.read.measure(rates.device))
            result.copy.append(rates.copy.measure(rates.device))
            result.matrix.append(matrix_rate.measure(rates.device))
            for measured, step in _rotate(ready, number):
                _sample(measured, step)
    result.measured = [measured for measured, _ in ready]
    return result


def _check_and_calibrate(
    candidate: Candidate, step: Step, oracle: Oracle, min_time: float
) -> tuple[Measured, Step]:
    """Raises `BrokenError` if the backend fails, or computes something else."""
    device = step.workload.device
    try:
        worst = oracle.error(step)
        if worst > 1:
            raise BrokenError(
                f"is wrong, so it is not timed: an element of its output is off by {worst:.3g} "
                f"times what {step.workload.case.dtype} is allowed"
            )
        step.forward()  # compiles what is compiled at the first call
        forward = _captured(step)
        once = timed(forward or step.forward, device)
    except (BrokenError, KeyboardInterrupt):
        raise
    except Exception as error:
        raise BrokenError(f"failed: {one_line(error)}") from error
    calls = min(MOST_CALLS, max(1, math.ceil(min_time / max(once, 1e-9))))
    return Measured(candidate, worst, forward is not None, calls), step


def _sample(measured: Measured, step: Step) -> None:
    device = step.workload.device
    measured.plan.append(timed(step.plan, device, measured.calls))
    forward = _captured(step) if measured.graph else None
    measured.graph = forward is not None
    run = forward or step.forward
    if measured.calls > 1:  # a short step is timed warm, a long one has no time to be cold
        run()
    measured.forward.append(timed(run, device, measured.calls))


def _captured(step: Step) -> Callable[[], None] | None:
    """The layers of a planned step as a CUDA graph, as engines run decodes; None where there is
    none: on a CPU, in steps with prefills, or where the backend does not support it."""
    decodes_on_gpu = step.workload.device.type == "cuda" and step.workload.case.phase == "decode"
    if not (decodes_on_gpu and step.backend.supports_cuda_graphs):
        return None
    try:
        return CUDARecorder(step.workload.device)(step.forward)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def _rotate(ready: list[tuple[Measured, Step]], number: int) -> Iterator[tuple[Measured, Step]]:
    first = number % len(ready)
    yield from (*ready[first:], *ready[:first])


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
