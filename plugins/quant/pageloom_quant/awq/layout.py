"""From AWQ's order of codes to that of `PackedWeight`."""

from __future__ import annotations

import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The output, of eight neighbours, whose code each nibble of a number holds, the lowest first."""


def unpack(packed: torch.Tensor) -> torch.Tensor:
    """The codes, uint8 ``[rows, 8 * columns]`` of 0 to 15, in int32 ``[rows, columns]``."""
    nibbles = torch.empty(*packed.shape, len(ORDER), dtype=torch.uint8)
    for position, column in enumerate(ORDER):
        nibbles[..., column] = (packed >> (4 * position)) & 15
    return nibbles.flatten(1)
