"""Paged attention on a CPU, in C++: decodes, chunks and prompts of a step in one call per layer."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, c_float, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from pageloom.contract import (
    AttentionBackend,
    AttentionBatch,
    AttentionSpec,
    KVQuantizer,
    native,
)

SOURCE = Path(__file__).parent / "native" / "cpu_paged.cpp"
# Sums keep their order, so results are the same on every run; these only let loops vectorise.
FLAGS = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # by number, as in the source
ELEMENTS = (None, "fp8_e4m3", "fp8_e5m2", "int8", "int4")  # likewise


class _Layer(ctypes.Structure):
    """As in native/layout.h."""

    _fields_ = (
        ("cache", c_void_p),
        ("dtype", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_size", c_int64),
        ("block_size", c_int64),
        ("window", c_int64),
        ("scale", c_float),
        ("softcap", c_float),
        ("element", c_int64),
        ("scale_per_vector", c_int64),
        ("k_scale", c_float),
        ("v_scale", c_float),
    )


class _Batch(ctypes.Structure):
    """As in native/cpu_paged.cpp."""

    _fields_ = (
        ("sequences", c_int64),
        ("tokens", c_int64),
        ("query_start", c_void_p),
        ("seq_lens", c_void_p),
        ("tables", c_void_p),
        ("table_stride", c_int64),
        ("slots", c_void_p),
    )


_Strides = c_int64 * 4


class CPUPaged(AttentionBackend):
    """Reads each K and V vector once for all query heads of its group, where it lies.

    A layer's cache is ``uint8 [num_blocks, bytes]``; native/layout.h says what a block holds, and
    native/coded.h what it holds in a KV format. The source is compiled when the backend is first
    made on a machine.
    """

    auto_rank = 20
    fuses_rotary = True

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"runs on a CPU, not on {spec.device}"
        if spec.dtype not in DTYPES:
            return f"computes in float32, bfloat16 and float16, not {spec.dtype}"
        if spec.quantizer is not None and (
            spec.layout is None or spec.layout.element not in ELEMENTS
        ):
            return (
                f"does not know how the KV format {spec.quantizer} lays out a vector; "
                "torch_paged runs every KV format"
            )
        if native.find_compiler() is None:
            return "needs a C++ compiler (c++, or the one that CXX names)"
        return None

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        self._forward = native.build(SOURCE, FLAGS).pageloom_forward
        self._forward.restype = None
        self._forward.argtypes = [
            POINTER(_Layer),
            POINTER(_Batch),
            *[c_void_p] * 4,
            POINTER(c_int64),
            *[c_void_p] * 3,
        ]
        self._cache: list[torch.Tensor] = []
        self._layers: list[_Layer] = []

    def bytes_per_block(self) -> int:
        return sum(self._layer_bytes())

    def allocate(self, num_blocks: int) -> None:
        layout = self.spec.layout
        for index, size in enumerate(self._layer_bytes()):
            spec = self.spec.layers[index]
            # Left as it is: a cache of gigabytes takes memory only as its blocks are written.
            cache = torch.empty(num_blocks, size, dtype=torch.uint8)
            k_scale, v_scale = self._static_scales(index)
            self._cache.append(cache)
            self._layers.append(
                _Layer(
                    cache=cache.data_ptr(),
                    dtype=DTYPES.index(self.spec.dtype),
                    heads=spec.num_heads,
                    kv_heads=spec.num_kv_heads,
                    head_size=spec.head_size,
                    block_size=self.spec.block_size,
                    window=spec.window or 0,
                    scale=spec.scale,
                    softcap=spec.softcap or 0.0,
                    element=ELEMENTS.index(layout.element if layout else None),
                    scale_per_vector=layout is not None and layout.scaling == "token_head",
                    k_scale=k_scale,
                    v_scale=v_scale,
                )
            )

    def plan(self, batch: AttentionBatch) -> None:
        self._held = batch  # its tensors must outlive the pointers
        self._batch = _Batch(
            sequences=batch.num_seqs,
            tokens=batch.num_tokens,
            query_start=batch.query_start.data_ptr(),
            seq_lens=batch.seq_lens.data_ptr(),
            tables=batch.block_tables.data_ptr(),
            table_stride=batch.block_tables.stride(0),
            slots=batch.slots.data_ptr(),
        )

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
        rotary: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> None:
        if sinks is not None:
            sinks = sinks.float().contiguous()
        cos, sin = (None, None) if rotary is None else (x.data_ptr() for x in rotary)
        self._forward(
            self._layers[layer],
            self._batch,
            q.data_ptr(),
            k.data_ptr(),
            v.data_ptr(),
            out.data_ptr(),
            _Strides(q.stride(0), k.stride(0), v.stride(0), out.stride(0)),
            None if sinks is None else sinks.data_ptr(),
            cos,
            sin,
        )

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        sources, targets = (torch.tensor([pair[i] for pair in pairs]).long() for i in (0, 1))
        for cache in self._cache:
            cache[targets] = cache[sources]

    def read_blocks(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.cat([cache[list(blocks)] for cache in self._cache], dim=1)

    def write_blocks(self, blocks: Sequence[int], data: torch.Tensor) -> None:
        for cache, part in zip(self._cache, data.split(self._layer_bytes(), dim=1), strict=True):
            cache[list(blocks)] = part

    def _layer_bytes(self) -> list[int]:
        """Bytes of one block in each layer: head sizes are rounded up to multiples of 16."""
        return [
            2 * self.spec.block_size * layer.num_kv_heads * self._vector_bytes(layer.head_size)
            for layer in self.spec.layers
        ]

    def _vector_bytes(self, head_size: int) -> int:
        width = -(-head_size // 16) * 16
        if self.spec.layout is not None:
            return self.spec.layout.bytes_per_vector(width)
        return width * self.spec.dtype.itemsize

    def _static_scales(self, layer: int) -> tuple[float, float]:
        """Of K and V; those of formats that have none mean nothing."""
        layout, quantizer = self.spec.layout, self.quantizer
        if layout is None or quantizer is None or layout.scaling != "static":
            return 1.0, 1.0
        return quantizer.static_scale(layer, "k"), quantizer.static_scale(layer, "v")
