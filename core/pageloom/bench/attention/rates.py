"""What the machine itself can do: its memory bandwidth and its matrix rate."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

READ_BYTES = {"cpu": 512 << 20, "cuda": 2 << 30}  # more than any cache holds
MATRIX_SIZE = {"cpu": 1024, "cuda": 8192}
CALLS = {"cpu": 1, "cuda": 10}  # in one measurement: a GPU is done in a millisecond
TRIES = 3


@dataclass(frozen=True, slots=True)
class Rate:
    """Something the machine does: ``run`` moves ``amount`` bytes, or computes as many FLOP."""

    run: Callable[[], object]
    amount: float

    def measure(self, device: torch.device) -> float:
        """Bytes or FLOP per second, now."""
        return self.amount / timed(self.run, device, CALLS[device.type])


class Rates:
    """Read and copy bandwidth, and the matrix rate for one dtype.

    Several ways to do each are tried, and the fastest is kept: torch's own kernels are not what
    is measured. A matrix product of float32 counts for the other dtypes too, for a CPU that is
    faster at it: a backend may convert.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        count = READ_BYTES[device.type] // 4
        self._x = torch.zeros(count, device=device).add_(1)
        self._y = torch.zeros(count, device=device).add_(1)
        x, y, size = self._x, self._y, 4.0 * count
        matrix = x.view(1 << 13, -1)
        self.read = self._fastest(
            Rate(lambda: x.sum(), size),
            Rate(lambda: x.view(2, -1).sum(1), size),
            Rate(lambda: torch.mv(matrix, y[: matrix.shape[1]]), size),
        )
        self.copy = Rate(lambda: y.copy_(x), 2 * size)
        self._matrix: dict[str, Rate] = {}

    def matrix(self, dtype: str) -> Rate:
        if dtype not in self._matrix:
            n = MATRIX_SIZE[self.device.type]
            dtypes = {dtype, "float32"} if self.device.type == "cpu" else {dtype}
            factors = [torch.randn(n, n, device=self.device).to(getattr(torch, d)) for d in dtypes]
            self._matrix[dtype] = self._fastest(
                *(Rate(lambda a=a: a @ a, 2.0 * n**3) for a in factors)  # type: ignore[misc]
            )
        return self._matrix[dtype]

    def _fastest(self, *rates: Rate) -> Rate:
        def speed(rate: Rate) -> float:
            rate.run()
            return max(rate.measure(self.device) for _ in range(TRIES))

        return max(rates, key=speed)


def timed(run: Callable[[], object], device: torch.device, times: int = 1) -> float:
    """Seconds per call."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(times):
        run()
    synchronize(device)
    return (time.perf_counter() - start) / times


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
