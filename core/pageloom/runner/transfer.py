"""Getting results off the device."""

from __future__ import annotations

import torch


def to_host(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Copies of int32 and float32 tensors on the CPU, brought over in one transfer.

    A transfer waits for the device, so a step should make one. Bits are moved, not values:
    token ids and floats come back exactly.
    """
    bits = torch.cat([tensor.contiguous().view(torch.int32).flatten() for tensor in tensors]).cpu()
    parts = bits.split([tensor.numel() for tensor in tensors])
    return [
        part.view(tensor.dtype).view(tensor.shape)
        for part, tensor in zip(parts, tensors, strict=True)
    ]
