"""`pageloom.contract.VectorLayout`, word by word in numpy: what the formats are compared with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

F16, F32 = np.float16, np.float32
LARGEST = {"float16": 65504.0, "bfloat16": float.fromhex("0x1.fep127")}  # others: float32's


def _minifloats(exponent_bits: int, mantissa_bits: int, count: int) -> np.ndarray:
    """The values of codes 0 to ``count - 1``: IEEE's rule, less its infinities."""
    bias, steps = 2 ** (exponent_bits - 1) - 1, 2**mantissa_bits
    exponent, mantissa = np.divmod(np.arange(count), steps)
    normal = (1 + mantissa / steps) * 2.0 ** (exponent - bias)
    return np.where(exponent == 0, mantissa / steps * 2.0 ** (1 - bias), normal)


MINIFLOATS = {"fp8_e4m3": _minifloats(4, 3, 0x7F), "fp8_e5m2": _minifloats(5, 2, 0x7C)}
NAN_CODE = 0x7F
LIMIT = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0, "int8": 127.0, "int4": 7.0}


@dataclass(frozen=True)
class Reference:
    """One layout, with the scale of the static ones."""

    element: str
    scaling: str
    scale: float = 1.0

    def encode(self, x: np.ndarray, dtype: str) -> np.ndarray:
        """Bytes of vectors ``x`` (float64 ``[n, head_size]``) that came as ``dtype``."""
        with np.errstate(all="ignore"):
            x = x.astype(F32)
            if self.scaling == "static":
                return self._codes(x * (F32(1) / F32(self.scale)))
            if self.element == "int4":
                return self._affine(_limited(x, "float16"))
            x = _limited(x, dtype)
            largest = np.maximum(np.abs(x).max(-1, keepdims=True), F32(2.0**-100))
            scale = largest / F32(LIMIT[self.element])
            if self.element in MINIFLOATS:
                scale = self._fitted(x, scale)
            return np.concatenate([self._codes(x * (F32(1) / scale)), scale.view(np.uint8)], -1)

    def _fitted(self, x: np.ndarray, least: np.ndarray) -> np.ndarray:
        """The scale, of 16 in an octave, whose codes come nearest to each vector."""
        octave = np.arange(16).reshape(-1, 1, 1) / 16
        scales = least * (2.0**octave).astype(F32)
        limit, values = F32(LIMIT[self.element]), MINIFLOATS[self.element]
        scaled = np.clip(x * (F32(1) / scales), -limit, limit)
        steps = (self._values(self._codes(scaled)) - scaled) / F32((values[-1] - values[-2]) / 256)
        squares = np.nan_to_num(np.rint(steps)).astype(np.int64) ** 2
        errors = squares.sum(-1, keepdims=True).astype(F32) * (4.0**octave).astype(F32)
        return np.take_along_axis(scales, errors.argmin(0)[None], 0)[0]

    def decode(self, data: np.ndarray) -> np.ndarray:
        """Float32 ``[n, head_size]``."""
        with np.errstate(all="ignore"):
            return self._decode(data)

    def _decode(self, data: np.ndarray) -> np.ndarray:
        if self.scaling == "static":
            return self._values(data) * F32(self.scale)
        codes, tail = data[:, :-4], np.ascontiguousarray(data[:, -4:])
        if self.element == "int4":
            scale, least = np.split(tail.view(F16).astype(F32), 2, axis=-1)
            return _halves(codes).astype(F32) * scale + least
        return self._values(codes) * tail.view(F32)

    def _codes(self, scaled: np.ndarray) -> np.ndarray:
        limit = F32(LIMIT[self.element])
        limited = np.clip(scaled, -limit, limit)
        if self.element in MINIFLOATS:
            return _nearest(limited, MINIFLOATS[self.element])
        whole = np.rint(limited)
        if self.element == "int8":
            return np.where(np.isnan(whole), -128, whole).astype(np.int8).view(np.uint8)
        return _pairs(np.where(np.isnan(whole), 0, whole + 8))

    def _values(self, codes: np.ndarray) -> np.ndarray:
        if self.element == "int8":
            whole = codes.view(np.int8).astype(F32)
            return np.where(whole == -128, F32(np.nan), whole)
        if self.element == "int4":
            stored = _halves(codes).astype(F32)
            return np.where(stored == 0, F32(np.nan), stored - 8)
        finite = MINIFLOATS[self.element]
        table = np.append(finite, [np.nan] * (128 - len(finite))).astype(F32)
        return np.where(codes & 128, -table[codes & 127], table[codes & 127])

    def _affine(self, x: np.ndarray) -> np.ndarray:
        least = x.min(-1, keepdims=True).astype(F16)
        spread = x.max(-1, keepdims=True) - least.astype(F32)
        scale = np.maximum(spread / F32(15), F32(2.0**-24)).astype(F16)
        codes = np.rint(np.clip((x - least.astype(F32)) * (1 / scale.astype(F32)), 0, 15))
        tail = [scale.view(np.uint8), least.view(np.uint8)]
        return np.concatenate([_pairs(np.nan_to_num(codes)), *tail], -1)


def _limited(x: np.ndarray, dtype: str) -> np.ndarray:
    most = F32(0.875 * LARGEST.get(dtype, float(np.finfo(F32).max)))
    return np.clip(x, -most, most)


def _nearest(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Codes of the nearest of ``values``, which lie in their order; of two, the even code."""
    size = np.abs(x.astype(np.float64))
    above = np.clip(np.searchsorted(values, size), 1, len(values) - 1)
    up, down = values[above] - size, size - values[above - 1]
    code = np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1)
    code = np.where(np.isnan(x), NAN_CODE, code + 128 * np.signbit(x))
    return code.astype(np.uint8)


def _pairs(codes: np.ndarray) -> np.ndarray:
    return (codes[:, ::2] + 16 * codes[:, 1::2]).astype(np.uint8)


def _halves(data: np.ndarray) -> np.ndarray:
    return np.stack([data % 16, data // 16], -1).reshape(len(data), -1)
