"""Root-mean-square normalisation (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pageloom.ops.choice import runs_fused


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """``x / rms(x) * weight`` over the last dimension, as a new tensor.

    ``x`` is floating ``[..., D]`` and ``weight``, of the same dtype, broadcasts against it. The
    statistics and the division are float32, the result is rounded to the dtype of ``x`` and then
    multiplied by ``weight``: the order in which the Llama family is trained.
    """
    if x.is_cuda:
        return F.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    # On the CPU F.rms_norm is ten small kernels; these are fewer and half the time.
    wide = x.float()
    scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    scale = scale.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(wide, scale).to(x.dtype).mul_(weight)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Add ``x`` to ``residual`` in place and return `rms_norm` of the sum.

    Shapes as there, but ``weight`` is ``[D]`` and ``residual`` contiguous.
    """
    if runs_fused(x):
        from pageloom.ops import fused

        if x.shape[-1] <= fused.MAX_ROW:
            return fused.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)
