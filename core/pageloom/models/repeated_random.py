"""Random numbers for tensors of gigabytes, of which only few are drawn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

PERIOD = 1048583
"""Numbers that are drawn for a tensor. A prime, so that in no matrix two rows are alike: each
begins at another of the numbers. As bfloat16 they fit into a processor's L2 cache."""

_DRAWING = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)


class RepeatedRandom(TorchDispatchMode):
    """Within, ``normal_`` and ``uniform_`` fill a contiguous tensor of more than `PERIOD` elements
    with repetitions of the first `PERIOD`, which is an order of magnitude faster."""

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func not in _DRAWING or args[0].numel() <= PERIOD or not args[0].is_contiguous():
            return func(*args, **(kwargs or {}))
        flat = args[0].view(-1)
        drawn = func(flat[:PERIOD], *args[1:], **(kwargs or {}))
        for part in flat[PERIOD:].split(PERIOD):
            part.copy_(drawn[: len(part)])
        return args[0]
