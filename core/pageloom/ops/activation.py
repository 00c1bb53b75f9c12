"""Gated activations (Shazeer 2020, arXiv:2002.05202)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from pageloom.ops.choice import runs_fused


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) * up`` of ``gate_up [T, 2 * I]`` (floating, gate first), as a new ``[T, I]``."""
    if runs_fused(gate_up):
        from pageloom.ops import fused

        return fused.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
