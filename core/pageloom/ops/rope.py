"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864), halves layout as in Llama."""

from __future__ import annotations

import torch

from pageloom.ops.choice import runs_fused
from pageloom.ops.norm import rms_norm


class RotaryTable:
    """The cosines and sines of every position, computed once in float32.

    ``inv_freq`` is float32 ``[D / 2]`` in radians per token, ``scale`` multiplies both tables
    (the attention factor of YaRN and LongRoPE). Positions are ``0 .. length - 1``. The tables
    take ``2 * length * D`` elements of ``dtype``.
    """

    def __init__(
        self,
        inv_freq: torch.Tensor,
        scale: float,
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        angles = torch.outer(torch.arange(length, dtype=torch.float32), inv_freq.float().cpu())
        cos, sin = angles.cos() * scale, angles.sin() * scale
        self._cos = torch.cat((cos, cos), -1).to(device, dtype)
        # Signed here once, so that rotating is a roll and two multiplications.
        self._sin = torch.cat((-sin, sin), -1).to(device, dtype)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines ``[T, 1, D]`` for ``positions`` int64 ``[T]``.

        `AttentionBackend.fuses_rotary` describes them, without the dimension of 1.
        """
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate_(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads ``x [T, H, D]`` in place by what `RotaryTable.at` returned; returns ``x``.

    Rows may be strided, so q and k are rotated in one pass while they lie in the merged matrix.
    """
    if runs_fused(x):
        from pageloom.ops import fused

        return fused.rotate_(x, cos, sin)
    swapped = x.roll(x.shape[-1] // 2, -1)
    return x.mul_(cos).addcmul_(swapped, sin)


def norm_rotate_(
    x: torch.Tensor, weight: torch.Tensor, eps: float, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """`rms_norm` of each head of ``x [T, H, D]`` by its row of ``weight [H, D]``, then `rotate_`.

    Returns the result; ``x`` may hold it or be unchanged.
    """
    if runs_fused(x):
        from pageloom.ops import fused

        return fused.rotate_(x, cos, sin, weight, eps)
    return rotate_(rms_norm(x, weight, eps), cos, sin)
