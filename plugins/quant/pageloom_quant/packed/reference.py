"""The packed linear layer in plain torch, for any device."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from pageloom_quant.packed.weight import PackedWeight

BLOCK_ELEMENTS = 1 << 22  # of the weight, expanded at a time


class ReferenceLinear(nn.Module):
    """``x W^T + b``: expands a block of outputs at a time and multiplies by it.

    What is held stays packed; while it runs it needs `BLOCK_ELEMENTS` numbers more.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.weight = weight.to(device)
        self.bias = None if bias is None else bias.to(device, dtype)
        self.weight_format = weight.format
        self._dtype = dtype
        self._rows = max(1, BLOCK_ELEMENTS // weight.in_features)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        outputs = self.weight.out_features
        result = x.new_empty(*x.shape[:-1], outputs)
        for start in range(0, outputs, self._rows):
            end = min(start + self._rows, outputs)
            block = self.weight.rows(start, end).dequantize(self._dtype)
            bias = None if self.bias is None else self.bias[start:end]
            result[..., start:end] = F.linear(x, block, bias)
        return result
