"""What `AttentionSuite` asks of a backend: models, block sizes, dtypes and KV formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from pageloom.contract import KVQuantizer, LayerSpec
from pageloom.contract.quantizer import Kind

MAX_MODEL_LEN = 768


@dataclass(frozen=True)
class Case:
    """A model and a cache. What is None is left to the backend's abilities: the most precise dtype
    that it computes in, and 16 tokens per block or else its own choice."""

    layers: tuple[LayerSpec, ...]
    dtype: torch.dtype | None = None
    block_size: int | None = None
    quantizer: str | None = None
    max_model_len: int = MAX_MODEL_LEN


def layer(heads: int = 4, kv_heads: int = 2, head_size: int = 64, **features: Any) -> LayerSpec:
    return LayerSpec(heads, kv_heads, head_size, scale=head_size**-0.5, **features)


PLAIN = Case((layer(),))
KINDS = Case((layer(), layer(6, 3, 128, window=9), layer(8, 8, softcap=5.0, sinks=True), layer()))
"""Layers that differ in all that may differ, and two that are alike."""

_BF16, _FP16 = torch.bfloat16, torch.float16

CASES: Mapping[str, Case] = MappingProxyType(
    {
        **{f"head size {d}": Case((layer(head_size=d),)) for d in (33, 64, 80, 96, 128, 256)},
        **{
            f"{group * kv} heads over {kv}": Case((layer(group * kv, kv),))
            for group, kv in (
                *((group, 2) for group in range(1, 9)),
                *((1, 1), (8, 1), (16, 1), (3, 3)),
            )
        },
        **{
            f"block size {size}": Case((layer(),), block_size=size)
            for size in (1, 2, 3, 4, 8, 16, 32, 48, 64, 128, 256)
        },
        "block size max_model_len": Case((layer(),), block_size=MAX_MODEL_LEN),
        **{f"window {w}": Case((layer(window=w),)) for w in (1, 5, 16, 17, 128, 5000)},
        "softcap": Case((layer(softcap=2.0),)),
        "sinks": Case((layer(sinks=True),)),
        "softcap, sinks and window": Case((layer(softcap=3.0, sinks=True, window=7),)),
        "softcap, sinks, window and block size 3": Case(
            (layer(9, 3, softcap=3.0, sinks=True, window=7),), block_size=3
        ),
        "layers of several kinds": KINDS,
        **{
            f"bfloat16, head size {d}": Case((layer(head_size=d),), _BF16)
            for d in (64, 80, 96, 128, 256)
        },
        **{f"float16, head size {d}": Case((layer(head_size=d),), _FP16) for d in (64, 80, 128)},
        **{
            f"bfloat16, block size {size}": Case((layer(8, 2, 128),), _BF16, size)
            for size in (1, 16, 32, 256)
        },
        "bfloat16, 9 heads over 3": Case((layer(9, 3),), _BF16),
        "float16, 9 heads over 3": Case((layer(9, 3),), _FP16),
        "bfloat16, window": Case((layer(window=20),), _BF16),
        "bfloat16, layers of several kinds": Case(KINDS.layers, _BF16),
        "float16, layers of several kinds": Case(KINDS.layers, _FP16),
    }
)

LONG: Mapping[str, Case] = MappingProxyType(
    {
        "window": Case((layer(window=200),)),
        "softcap and sinks": Case((layer(softcap=3.0, sinks=True),)),
        "block size 1": Case((layer(),), block_size=1),
        "block size 256": Case((layer(),), block_size=256),
        "bfloat16, 8 heads over 2, head size 128": Case((layer(8, 2, 128),), _BF16),
        "float16, 9 heads over 3": Case((layer(9, 3),), _FP16),
    }
)
"""What long contexts are tried with."""

QUANTIZED: Mapping[str, Case] = MappingProxyType(
    {
        "plain": PLAIN,
        "head size 80": Case((layer(head_size=80),)),
        "9 heads over 3": Case((layer(9, 3),)),
        "bfloat16, head size 128": Case((layer(8, 2, 128),), _BF16),
        "layers of several kinds": KINDS,
    }
)
"""What each KV format is tried with."""


ROTATED: Mapping[str, Case] = MappingProxyType(
    {
        **{f"head size {d}": Case((layer(head_size=d),)) for d in (2, 34, 128)},
        "9 heads over 3, block size 3": Case((layer(9, 3),), block_size=3),
        "layers with sinks and with a window": Case((layer(sinks=True), layer(window=9))),
        "bfloat16": Case((layer(),), _BF16),
        "float16": Case((layer(),), _FP16),
    }
)
"""What backends that fuse rotations are tried with."""


@dataclass(frozen=True)
class Sizes:
    """How much of each kind of case is tried; no size leaves out a kind."""

    contexts: tuple[int, ...]  # tokens, about
    long_context: int  # tokens, about, with each of `LONG`
    distinct: int  # blocks of a context that are drawn; the others are copies
    prompts: tuple[int, int, int]  # tokens: a prefill, one beside it, and chunks behind both
    sequences: int  # in one step
    max_examples: int  # of random steps


SIZES: Mapping[str, Sizes] = MappingProxyType(
    {
        "full": Sizes((1, 17, 100, 300, 1000, 2500, 8192), 3000, 512, (600, 300, 130), 150, 40),
        "small": Sizes((1, 17, 300, 8192), 700, 32, (90, 40, 33), 20, 8),
    }
)


class UnknownFormat(KVQuantizer):
    """A format that no kernel knows: symmetric int8, with the float32 scale after each vector.

    A backend that runs any format through `encode` and `decode` must do it right; one that does
    not must say so in `check`.
    """

    NAME = "an unregistered format"

    def bytes_per_vector(self, head_size: int) -> int:
        if head_size % 4:
            raise ValueError(f"the head size must be a multiple of 4, not {head_size}")
        return head_size + 4

    def encode(self, x: torch.Tensor, layer: int, kind: Kind) -> torch.Tensor:
        x = x.float()
        scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-8) / 127
        codes = (x / scale).round().to(torch.int8)
        return torch.cat([codes.view(torch.uint8), scale.view(torch.uint8)], dim=-1)

    def decode(
        self, data: torch.Tensor, layer: int, kind: Kind, dtype: torch.dtype
    ) -> torch.Tensor:
        codes = data[..., :-4].view(torch.int8)
        return (codes * data[..., -4:].contiguous().view(torch.float32)).to(dtype)
