"""Whether the fused kernels run a tensor's operations."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OLDEST = (8, 0)  # compute capability: arithmetic on bfloat16


def runs_fused(x: torch.Tensor) -> bool:
    """Whether ``ops.fused`` can be imported and its kernels run where ``x`` lies, on its dtype."""
    return x.is_cuda and x.dtype in DTYPES and _has_kernels(x.get_device())


@cache
def _has_kernels(device: int) -> bool:
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST
