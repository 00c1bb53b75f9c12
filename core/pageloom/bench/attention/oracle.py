"""Whether a backend computes what it is about to be timed for."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from pageloom.bench.attention.workload import Step, Workload
from pageloom.contract import KVQuantizer
from pageloom.testing.attention_oracle import TOLERANCE, attention, excess

SEQUENCES, ROWS = 32, 16  # checked at most: sequences of a step, and query tokens of each


class Oracle:
    """What some rows of a step's output must be, in its first and its last layer."""

    def __init__(self, workload: Workload, quantizer: KVQuantizer | None) -> None:
        self._tolerance = TOLERANCE[workload.dtype]
        self._expected: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for layer in {0, workload.num_layers - 1}:
            rows, expected = zip(*_exact(workload, quantizer, layer), strict=True)
            self._expected[layer] = torch.cat(rows), torch.cat(expected)

    def error(self, step: Step) -> float:
        """The worst error of an element, as a multiple of what is allowed: up to 1 is right."""
        worst = 0.0
        step.plan()
        for layer, (rows, expected) in self._expected.items():
            step.out.fill_(torch.nan)
            step.layer(layer)
            worst = max(worst, float(excess(step.out[rows], expected, self._tolerance).max()))
        return worst


def _exact(
    work: Workload, quantizer: KVQuantizer | None, layer: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of the output, and what must be in them, sequence by sequence."""
    starts = work.queries.cumsum(0) - work.queries
    for i in _spread(len(starts), SEQUENCES):
        start, count = int(starts[i]), int(work.queries[i])
        new, (old_k, old_v) = slice(start, start + count), work.old(layer, i)
        k, v = torch.cat([old_k, work.k[new]]), torch.cat([old_v, work.v[new]])
        if quantizer is not None:
            k = quantizer.decode(quantizer.encode(k, layer, "k"), layer, "k", work.dtype)
            v = quantizer.decode(quantizer.encode(v, layer, "v"), layer, "v", work.dtype)
        some = torch.tensor(_spread(count, ROWS), device=work.device)
        positions = some + int(work.old_lengths[i])
        expected = attention(work.q[new][some], positions, k, v, work.layer, None)
        yield start + some, expected


def _spread(count: int, most: int) -> list[int]:
    """Up to ``most`` of ``range(count)``, the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [round(i * (count - 1) / (most - 1)) for i in range(most)]
