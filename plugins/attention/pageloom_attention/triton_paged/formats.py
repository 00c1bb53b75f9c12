# ruff: noqa: N803, N806  (constants are in capitals, as is usual in kernels)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""Vectors on their way into the cache and out of it, in each `pageloom.contract.VectorLayout`.

A KV head's *part* of a block is the codes of its vectors, one vector behind the other, and then
their scales, if each has its own: four bytes a vector. So codes are as aligned as without scales.
Without a layout, codes are the elements themselves.

Codes become numbers and numbers codes by their bits, on every GPU alike, for integers and
four-bit numbers have no fast conversion and fp8 has one only on some. Only reading e4m3 has two
ways, because the bits of e4m3 take longer than its memory on GPUs that convert it themselves.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Whoever adds it to a float32 of at most 2^22 rounds that to a whole number, ties to even, which
# then is what the last bits say.
WHOLE = tl.constexpr(1.5 * 2**23)
SCALE_BYTES = tl.constexpr(4)
LEAST_SCALED = tl.constexpr(2.0**-100)
LEAST_STEP = tl.constexpr(2.0**-24)
NAN32 = tl.constexpr(0x7FC00000)
NAN16_TWICE = tl.constexpr(0x7E007E00)


@triton.jit
def store_vectors(
    cache,
    x,  # [n, WIDTH], zero where that is more than HEAD_SIZE
    part,  # int64 [n]
    slot,  # [n], within the part
    held,  # [n], which ones are to be stored
    inverse,  # of the scale, if that is a constant
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALED: tl.constexpr,
    LIMIT: tl.constexpr,
    MOST: tl.constexpr,
):
    code = x
    if ELEMENT is not None:
        x = x.to(tl.float32)
        if SCALED:
            nan = tl.max((x != x).to(tl.int32), 1) > 0
            x = tl.minimum(tl.maximum(x, -MOST), MOST)
            if ELEMENT == "int4":
                within = (tl.arange(0, WIDTH) < HEAD_SIZE)[None, :]
                least = tl.min(tl.where(within, x, float("inf")), 1).to(tl.float16)
                spread = tl.max(tl.where(within, x, float("-inf")), 1) - least.to(tl.float32)
                step = tl.maximum(tl.div_rn(spread, 15.0), LEAST_STEP).to(tl.float16)
                x -= least.to(tl.float32)[:, None]
                scale = step.to(tl.float32)
                word = step.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
                word |= least.to(tl.int16, bitcast=True).to(tl.int32) << 16
                word = tl.where(nan, NAN16_TWICE, word)
            else:
                scale = tl.div_rn(tl.maximum(tl.max(tl.abs(x), 1), LEAST_SCALED), LIMIT)
                if ELEMENT == "fp8_e4m3":
                    scale = _fitted(x, scale, 3, LIMIT, 32.0)
                elif ELEMENT == "fp8_e5m2":
                    scale = _fitted(x, scale, 2, LIMIT, 8192.0)
                word = tl.where(nan, NAN32, scale.to(tl.int32, bitcast=True))
            tl.store(_scales_at(cache, part, slot, BLOCK_SIZE, ROW), word, mask=held)
            inverse = tl.div_rn(1.0, scale)[:, None]
        code = _encode(x * inverse, ELEMENT, SCALED, LIMIT)
    place = tl.arange(0, code.shape[1])[None, :]
    at = _codes_at(part, slot, BLOCK_SIZE, ROW, SCALED)
    tl.store(cache + at[:, None] + place, code, mask=held[:, None] & (place < ROW))


@triton.jit
def _fitted(x, least, MANTISSA: tl.constexpr, LIMIT: tl.constexpr, STEP: tl.constexpr):
    """The scales whose codes come nearest to the vectors ``x [n, WIDTH]``, of 16 in an octave.
    ``least [n]`` clips none of them, STEP is from the largest number of a code to the next."""
    HALF: tl.constexpr = 1 << (22 - MANTISSA)
    scale, best = least, tl.full(least.shape, float("inf"), tl.float32)
    for i in tl.static_range(16):
        candidate = least * 2.0 ** (i / 16)
        scaled = x * tl.div_rn(1.0, candidate)[:, None]
        scaled = tl.minimum(tl.maximum(scaled, -LIMIT), LIMIT)
        # Rounds to the nearest code, which way does not matter; subnormal ones are near enough.
        code = (scaled.to(tl.int32, bitcast=True) + HALF) & (-2 * HALF)
        steps = (code.to(tl.float32, bitcast=True) - scaled) * (256 / STEP)
        steps = steps + WHOLE - WHOLE
        # A sum of small whole numbers is the same in any order.
        error = tl.sum(steps * steps, 1) * 4.0 ** (i / 16)
        scale = tl.where(error < best, candidate, scale)
        best = tl.minimum(error, best)
    return scale


@triton.jit
def load_codes(
    cache,
    part,  # int64 [n]
    slot,  # [n], within the part
    inside,  # [n], which ones there are; if MASKED, the others become zero
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    DTYPE: tl.constexpr,
    MASKED: tl.constexpr,
    TURNED: tl.constexpr,
):
    """``[n, WIDTH]`` in DTYPE, or if TURNED ``[WIDTH, n]``: elements, whole or fp8 numbers."""
    COUNT: tl.constexpr = WIDTH // 2 if ELEMENT == "int4" else WIDTH
    ZERO: tl.constexpr = 0x88 if ELEMENT == "int4" else 0
    place = tl.arange(0, COUNT)
    at = _codes_at(part, slot, BLOCK_SIZE, ROW, SCALED)
    if TURNED and ELEMENT != "int4":
        at, inside, place = at[None, :], inside[None, :], place[:, None]
    else:
        at, inside, place = at[:, None], inside[:, None], place[None, :]
    if MASKED:
        # What slots past the end hold may be NaN, which a weight of zero would not cancel.
        code = tl.load(cache + at + place, mask=inside & (place < ROW), other=ZERO)
    elif COUNT != ROW:
        code = tl.load(cache + at + place, mask=place < ROW, other=ZERO)
    else:
        code = tl.load(cache + at + place)

    if ELEMENT == "int4":
        number = _decode_int4(code, SCALED, DTYPE)
        if TURNED:
            number = tl.trans(number)
    elif ELEMENT is None or TURNED:
        number = _decode(code, ELEMENT, SCALED, NATIVE).to(DTYPE)
    else:
        # In pairs. Else Triton would read each byte alone, where the matrix product needs it.
        even, odd = tl.split(tl.reshape(code, code.shape[0], WIDTH // 2, 2))
        even = _decode(even, ELEMENT, SCALED, NATIVE).to(DTYPE)
        odd = _decode(odd, ELEMENT, SCALED, NATIVE).to(DTYPE)
        number = tl.interleave(even, odd)
    return number


@triton.jit
def _decode(code, ELEMENT: tl.constexpr, SCALED: tl.constexpr, NATIVE: tl.constexpr):
    """The numbers that codes stand for, NaN if a code says so but not if a scale already does."""
    if ELEMENT is None:
        number = code
    elif ELEMENT == "fp8_e4m3":
        number = code.to(tl.float8e4nv, bitcast=True) if NATIVE else _decode_e4m3(code, SCALED)
    elif ELEMENT == "fp8_e5m2":
        # The upper half of a float16.
        number = (code.to(tl.int16) << 8).to(tl.float16, bitcast=True)
    else:
        number = _less(code ^ 0x80, 128)
        if not SCALED:
            number = tl.where(code == 0x80, float("nan"), number)
    return number


@triton.jit
def load_scales(
    cache,
    part,
    slot,
    inside,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    ELEMENT: tl.constexpr,
    MASKED: tl.constexpr,
):
    """What to multiply the numbers of `load_codes` by and what to add then, float32 ``[n]``."""
    at = _scales_at(cache, part, slot, BLOCK_SIZE, ROW)
    word = tl.load(at, mask=inside, other=0) if MASKED else tl.load(at)
    if ELEMENT == "int4":
        scale = word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        added = least + 8 * scale
    else:
        scale, added = word.to(tl.float32, bitcast=True), 0.0
    return scale, added


@triton.jit
def _codes_at(part, slot, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr, SCALED: tl.constexpr):
    at = (part * BLOCK_SIZE + slot) * ROW
    return at + part * (BLOCK_SIZE * SCALE_BYTES) if SCALED else at


@triton.jit
def _scales_at(cache, part, slot, BLOCK_SIZE: tl.constexpr, ROW: tl.constexpr):
    codes = (part + 1) * (BLOCK_SIZE * ROW)
    scales = part * (BLOCK_SIZE * SCALE_BYTES)
    return (cache + codes + scales).to(tl.pointer_type(tl.int32)) + slot


@triton.jit
def _encode(x, ELEMENT: tl.constexpr, SCALED: tl.constexpr, LIMIT: tl.constexpr):
    """The codes of ``x`` (float32 ``[n, m]``) as bytes, ``[n, m]`` or for int4 ``[n, m / 2]``."""
    nan = x != x
    if ELEMENT == "int4" and SCALED:
        x = tl.minimum(tl.maximum(x, 0.0), 15.0)
    else:
        x = tl.minimum(tl.maximum(x, -LIMIT), LIMIT)
    if ELEMENT == "fp8_e4m3":
        code = tl.where(nan, 0x7F, _encode_fp8(x, 3, -6))
    elif ELEMENT == "fp8_e5m2":
        code = tl.where(nan, 0x7F, _encode_fp8(x, 2, -14))
    else:
        whole = (x + WHOLE).to(tl.int32, bitcast=True)
        if ELEMENT == "int8":
            code = tl.where(nan, 0x80, whole & 0xFF)
        else:
            code = whole & 15 if SCALED else tl.where(nan, 0, whole + 8 & 15)
            even, odd = tl.split(tl.reshape(code, code.shape[0], code.shape[1] // 2, 2))
            code = even | odd << 4
    return code.to(tl.uint8)


@triton.jit
def _encode_fp8(x, MANTISSA: tl.constexpr, LEAST: tl.constexpr):
    """Bits of the nearest fp8 that has so many bits of mantissa and 2^LEAST as least normal."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    # Half of what is cut off, or just less where the tie goes down to even.
    rounded = bits + ((1 << (SHIFT - 1)) - 1) + (bits >> SHIFT & 1)
    normal = (rounded >> SHIFT) - ((LEAST + 126) << MANTISSA)
    # Below, all lie equally far apart: as far as the last bits of this number.
    RULER: tl.constexpr = 2.0 ** (SHIFT + LEAST)
    subnormal = (size + RULER).to(tl.int32, bitcast=True) & ((1 << SHIFT) - 1)
    code = tl.where(size < 2.0**LEAST, subnormal, normal)
    return code | x.to(tl.int32, bitcast=True) >> 24 & 0x80


@triton.jit
def _decode_e4m3(code, SCALED: tl.constexpr):
    # Sign and exponent go where float32 has them, whose exponents count from 120 farther down.
    bits = code.to(tl.int8, bitcast=True).to(tl.int32)
    number = (bits << 20 & -0x78100000).to(tl.float32, bitcast=True) * 2.0**120
    if not SCALED:
        number = tl.where((bits & 0x7F) == 0x7F, float("nan"), number)
    return number


@triton.jit
def _decode_int4(code, SCALED: tl.constexpr, DTYPE: tl.constexpr):
    """Codes less 8: ``[n, m]`` bytes as ``[n, 2 m]`` numbers."""
    low, high = code & 15, code >> 4
    even, odd = _less(low, 8), _less(high, 8)
    if not SCALED:
        even = tl.where(low == 0, float("nan"), even)
        odd = tl.where(high == 0, float("nan"), odd)
    return tl.interleave(even.to(DTYPE), odd.to(DTYPE))


@triton.jit
def _less(code, ZERO: tl.constexpr):
    """``code - ZERO`` as float32, by way of ``2^23 + code``, whose last bits are the code."""
    return (code.to(tl.int32) | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + ZERO)
