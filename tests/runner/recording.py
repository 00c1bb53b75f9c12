"""CUDA graphs without CUDA: operations are recorded as they run, and replayed on the same memory.

Like a graph, a recording holds addresses, shapes and numbers as they were: of what the recorded
Python code would decide anew, nothing is. That is what a model and a backend must stand.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ops = torch.ops.aten
# What brings values to the host.
WAITING = (ops.item.default, ops._local_scalar_dense.default, ops.nonzero.default)


class Recorded(TorchDispatchMode):
    """Every operation within, with the tensors it took and gave."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = func(*args, **kwargs)
        if func in WAITING:
            raise RuntimeError(f"{func} waits for the device while a graph is captured")
        self.operations.append((func, args, kwargs, given))
        return given

    def replay(self) -> None:
        for func, args, kwargs, given in self.operations:
            again = func(*args, **kwargs)
            for old, new in zip(_tensors(given), _tensors(again), strict=True):
                if old.data_ptr() != new.data_ptr():  # neither a view nor in place
                    old.copy_(new)


class FakeRecorder:
    """Takes the place of `CUDARecorder`, and counts."""

    def __init__(self) -> None:
        self.recordings = 0
        self.replays = 0

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        compute()  # as the true one does
        recorded = Recorded()
        with recorded:
            result = compute()
        self.recordings += 1

        def replay() -> torch.Tensor:
            self.replays += 1
            recorded.replay()
            return result

        return replay


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [one for one in value if isinstance(one, torch.Tensor)] if value else []
