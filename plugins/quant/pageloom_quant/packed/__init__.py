"""Linear layers whose weights stay packed.

A loader makes a `PackedWeight` of each part of a layer, merges them with `PackedWeight.cat`, and
answers `WeightLoader.linear` with what `packed_linear` returns.
"""

from __future__ import annotations

import logging

import torch
from torch import nn

from pageloom_quant.packed import cpu, triton
from pageloom_quant.packed.reference import ReferenceLinear
from pageloom_quant.packed.weight import PackedWeight

__all__ = ["PackedWeight", "packed_linear", "why_not_native"]

log = logging.getLogger(__name__)


def packed_linear(
    weight: PackedWeight,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> nn.Module:
    """The fastest module there is here that computes ``x W^T + b`` from the packed weight.

    It maps ``dtype [..., in_features]`` on ``device`` to ``dtype [..., out_features]``; ``bias``
    is ``[out_features]`` or None. ``weight`` and ``bias`` may lie on any device. Its
    ``weight_format`` is ``int4`` or ``int8``. Where no native code can be had a line is logged,
    and `ReferenceLinear` computes it, several times slower.
    """
    reason = why_not_native(dtype, device)
    if reason is None and device.type == "cpu" and cpu.fits(weight):
        return cpu.CPULinear(weight, bias, dtype)
    if reason is None and device.type == "cuda" and triton.fits(weight):
        return triton.TritonLinear(weight, bias, dtype, device)
    _warn(reason or f"the native code cannot read groups of {weight.group_size}")
    return ReferenceLinear(weight, bias, dtype, device)


def why_not_native(dtype: torch.dtype, device: torch.device) -> str | None:
    """Why layers of this dtype and device can only run in `ReferenceLinear`; None if they need
    not."""
    if device.type == "cpu":
        return cpu.why_not(dtype)
    if device.type == "cuda":  # AMD's GPUs too
        return triton.why_not(dtype, device)
    return f"there is no native code for packed weights on {device.type}"


_warned: set[str] = set()


def _warn(reason: str) -> None:
    """Once per reason: a model has hundreds of layers."""
    if reason not in _warned:
        _warned.add(reason)
        log.warning(
            "packed linear layers are expanded whenever they run, which is slow: %s", reason
        )
