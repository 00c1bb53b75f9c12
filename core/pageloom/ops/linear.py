"""The plain linear layer, possibly several merged into one."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

_PACKING_ROWS = 32
"""Rows that oneDNN is told to expect. On AMX, weights packed for 32 rows were as fast as those
packed for the true number from 1 to 2048, while packing for 1 row costs a fifth at 32 to 512."""


class Linear(nn.Module):
    """``x W^T + b`` for ``x [..., in_features]``, result ``[..., out_features]``, one dtype.

    ``weight`` is ``[out_features, in_features]`` and ``bias`` ``[out_features]`` or None; both are
    uninitialised until filled. `finish` must be called once after that.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight: torch.Tensor = weight
        self.bias = bias
        self._packed: torch.Tensor | None = None

    def finish(self) -> None:
        """Take the form that runs fastest here and release the other (`weight` is then empty).

        In bfloat16 on a CPU this packs the weight for oneDNN, 1.6 times as fast as plain for few
        rows and equal at 2048. In float32 packing gains nothing, so the weight stays.
        """
        if packs(self.weight):
            self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKING_ROWS)
            self.weight = self.weight.new_empty(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._packed is None:
            return F.linear(x, self.weight, self.bias)
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self._packed, self.bias, "none", [], ""
        )
        return result


def packs(weight: torch.Tensor) -> bool:
    """Whether `Linear.finish` will pack this weight."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )
