"""Rotations of q and k that a backend fuses, drawn and checked."""

from __future__ import annotations

import math

import torch

from pageloom.testing.attention_rig import Rig

Rotary = tuple[torch.Tensor, torch.Tensor]


class RotaryRig(Rig):
    """Has q and k rotated by the backend, in all layers but the second of three."""

    def call(
        self, index: int, tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if index % 3 == 1:
            return super().call(index, tokens)
        q, k, v = self.draw(index, tokens)
        # Rotated k is what must be representable in a KV format, and stay so.
        draw = any_angles if self.quantizer is None else quarter_turns
        cos, sin = draw(tokens, q.shape[-1], q.dtype, self.generator)
        rotary = cos.to(q.device), sin.to(q.device)
        if self.quantizer is not None:
            k.copy_(rotated(k, (rotary[0], -rotary[1])))
        turned = rotated(q, rotary), rotated(k, rotary).to(k.dtype)
        return *turned, v, self.attend(index, q, k, v, rotary)


def any_angles(
    tokens: int, head_size: int, dtype: torch.dtype, generator: torch.Generator
) -> Rotary:
    """``rotary`` of `AttentionBackend.fuses_rotary` by random angles, shrunk to 0.8."""
    angles = 2 * math.pi * torch.rand(tokens, head_size // 2, generator=generator)
    return _tables(0.8 * angles.cos(), 0.8 * angles.sin(), dtype)


def quarter_turns(
    tokens: int, head_size: int, dtype: torch.dtype, generator: torch.Generator
) -> Rotary:
    """The same by random multiples of a right angle: such a rotation rounds nothing."""
    quarters = torch.randint(4, (tokens, head_size // 2), generator=generator)
    cos, sin = torch.tensor([1, 0, -1, 0]), torch.tensor([0, 1, 0, -1])
    return _tables(cos[quarters], sin[quarters], dtype)


def rotated(x: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """Heads ``x [T, H, D]`` rotated by the definition, in float64."""
    cos, sin = (table.double().unsqueeze(1) for table in rotary)
    left, right = x.double().chunk(2, -1)
    return x.double() * cos + torch.cat((right, left), -1) * sin


def _tables(cos: torch.Tensor, sin: torch.Tensor, dtype: torch.dtype) -> Rotary:
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
