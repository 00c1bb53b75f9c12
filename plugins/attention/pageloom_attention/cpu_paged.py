"""Paged attention on a CPU with native decodes."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import torch

from pageloom.contract import AttentionBatch, AttentionSpec, KVQuantizer, LayerSpec, native
from pageloom_attention.torch_paged import DecodeGroup, TorchPaged

SOURCE = Path(__file__).with_name("cpu_paged.cpp")
MAX_HEAD_SIZE = 512  # as in the source
# Sums keep their order, so results are the same on every run; these only let loops vectorise.
FLAGS = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math")
DTYPES = (torch.float32, torch.bfloat16)

_P, _I, _F, _B = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_bool
_DECODE: list[Any] = [_B, _P, _I, _P, _I, _P, _P, _P, _I, _P, _I, _I, _I, _I, _I, _I, _F, _F, _P]
_STORE: list[Any] = [_P, _P, _I, _I, _P, _P, _P, _I, _I, _I, _I]


class CPUPaged(TorchPaged):
    """Stores and decodes in C++, which reads K and V where they lie; prefills as `TorchPaged`.

    The source is compiled when the backend is first made on a machine.
    """

    auto_rank = 20

    @classmethod
    def check(cls, spec: AttentionSpec) -> str | None:
        if spec.device.type != "cpu":
            return f"runs on a CPU, not on {spec.device}"
        if spec.dtype not in DTYPES:
            return f"computes in float32 and bfloat16, not {spec.dtype}"
        if spec.quantizer is not None:
            return "stores the model's dtype only; torch_paged runs every KV quantizer"
        largest = max(layer.head_size for layer in spec.layers)
        if largest > MAX_HEAD_SIZE:
            return f"supports head sizes up to {MAX_HEAD_SIZE}, not {largest}"
        if native.find_compiler() is None:
            return "needs a C++ compiler (c++, or the one that CXX names)"
        return None

    def __init__(self, config: Any, spec: AttentionSpec, quantizer: KVQuantizer | None) -> None:
        super().__init__(config, spec, quantizer)
        library = native.build(SOURCE, FLAGS)
        self._native_decode, self._native_store = library.pageloom_decode, library.pageloom_store
        self._native_decode.argtypes, self._native_decode.restype = _DECODE, None
        self._native_store.argtypes, self._native_store.restype = _STORE, None

    def plan(self, batch: AttentionBatch) -> None:
        self._batch = batch
        super().plan(batch)

    def plan_store(self, slots: torch.Tensor) -> None:
        pass  # the slots of the batch are all that `store` needs

    def plan_decodes(
        self, batch: AttentionBatch, layer: LayerSpec, seen: list[int]
    ) -> list[DecodeGroup]:
        return []

    def store(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        spec, (keys, values) = self.spec.layers[layer], self.cache[layer]
        size = self.spec.dtype.itemsize
        self._native_store(
            k.data_ptr(),
            v.data_ptr(),
            k.stride(0) * size,
            v.stride(0) * size,
            keys.data_ptr(),
            values.data_ptr(),
            self._batch.slots.data_ptr(),
            self._batch.num_tokens,
            spec.num_kv_heads,
            self.spec.block_size,
            spec.head_size * size,
        )

    def decode_all(
        self, layer: int, q: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None
    ) -> None:
        batch, spec, (keys, values) = self._batch, self.spec.layers[layer], self.cache[layer]
        if not batch.num_decodes:
            return
        if sinks is not None:
            sinks = sinks.float().contiguous()
        self._native_decode(
            self.spec.dtype is torch.bfloat16,
            q.data_ptr(),
            q.stride(0),
            out.data_ptr(),
            out.stride(0),
            keys.data_ptr(),
            values.data_ptr(),
            batch.block_tables.data_ptr(),
            batch.block_tables.stride(0),
            batch.seq_lens.data_ptr(),
            batch.num_decodes,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_size,
            self.spec.block_size,
            spec.window or 0,
            spec.scale,
            spec.softcap or 0.0,
            None if sinks is None else sinks.data_ptr(),
        )
