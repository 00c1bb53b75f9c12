"""What is passed to the kernels: the structures of ``kernels/params.cuh``."""

from __future__ import annotations

import ctypes

_P, _L, _I, _U, _F = (
    ctypes.c_void_p,
    ctypes.c_longlong,
    ctypes.c_int,
    ctypes.c_uint,
    ctypes.c_float,
)


class AttentionParams(ctypes.Structure):
    _fields_ = [
        ("q", _P),
        ("out", _P),
        ("cache", _P),
        ("scales", _P),
        ("block_tables", _P),
        ("seq_lens", _P),
        ("query_start", _P),
        ("work", _P),
        ("sinks", _P),
        ("partials", _P),
        ("q_stride", _L),
        ("out_stride", _L),
        ("table_stride", _L),
        ("num_kv_heads", _I),
        ("window", _I),
        ("splits", _I),
        ("min_split_tokens", _I),
        ("scale", _F),
        ("value_scale", _F),
        ("softcap", _F),
    ]


class StoreParams(ctypes.Structure):
    _fields_ = [
        ("k", _P),
        ("v", _P),
        ("cache", _P),
        ("scales", _P),
        ("slots", _P),
        ("k_stride", _L),
        ("v_stride", _L),
        ("num_tokens", _U),
        ("num_kv_heads", _U),
        ("key_inverse", _F),
        ("value_inverse", _F),
        ("most", _F),
    ]


class CopyParams(ctypes.Structure):
    _fields_ = [("cache", _P), ("pairs", _P), ("block_words", _L)]
