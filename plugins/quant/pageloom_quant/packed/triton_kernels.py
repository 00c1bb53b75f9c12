# ruff: noqa: N803, N806, SIM300  (constants are in capitals, as is usual in kernels)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels of `TritonLinear`: multiply by packed codes, and add up what splits computed.

Inputs are taken a *step* at a time, which lies within a group, so a step has one scale for each
output. Outputs lie in *panels*: what a step needs of a panel is one piece of memory. Codes lie in
words of 32 bits, in an order (see `_nibbles`) in which a thread of NVIDIA's 16-bit matrix
instructions finds in one word all that it multiplies, so that they move through registers once.

A code becomes a number less half the range of codes, which every dtype holds exactly, and there are
two ways to go on. For few rows it is multiplied as it is, and what a step adds up to is scaled:
that is done once per row and step, where scaling and rounding weights would be done once per
weight, more than a GPU can do in the time it takes to read them. Offsets then multiply the sums of
a step's inputs, which the matrix units add up too, else idle. For many rows weights are scaled, and
so rounded, and results stay in the matrix units.

Under ``TRITON_INTERPRET=1`` these run on a CPU. The interpreter keeps bfloat16 as integers, so
there ``DTYPE`` is float32 for it and everything is converted as it is loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

ROW_TILES = tl.constexpr(8)
"""So many tiles of rows go through the outputs together: caches hold what they share."""
# Numbers whose last bit counts as 1, and their bits twice.
BFLOAT16_BASE, BFLOAT16_BITS = tl.constexpr(128), tl.constexpr(0x43004300)
FLOAT16_BASE, FLOAT16_BITS = tl.constexpr(1024), tl.constexpr(0x64006400)


@triton.jit(do_not_specialize=["rows", "steps_per_split"])
def multiply_kernel(
    out,  # [rows, outputs]; of more than one split, float32 [splits, rows, outputs]
    x,  # [rows, steps * STEP]
    codes,  # int32 [panels, steps, PANEL, STEP * BITS / 32]
    scales,  # [groups, panels * PANEL]
    offsets,  # likewise, or None: all are 0
    bias,  # [outputs] or None
    rows,
    outputs,
    panels,
    steps,
    steps_per_split,
    BITS: tl.constexpr,
    STEP: tl.constexpr,
    GROUP_STEPS: tl.constexpr,  # in a group
    PANEL: tl.constexpr,
    ROWS: tl.constexpr,  # per program
    TILE: tl.constexpr,  # outputs per program
    SCALE_PRODUCTS: tl.constexpr,  # rather than weights
    DTYPE: tl.constexpr,  # of what is multiplied
    PRECISION: tl.constexpr,
):
    """Grid: tiles of rows times tiles of outputs, splits."""
    WORDS: tl.constexpr = STEP * BITS // 32
    program, tiles = tl.program_id(0), tl.cdiv(outputs, TILE)
    row_tile, tile = tl.swizzle2d(
        program // tiles, program % tiles, tl.cdiv(rows, ROWS), tiles, ROW_TILES
    )
    row, output = row_tile * ROWS + tl.arange(0, ROWS), tile * TILE + tl.arange(0, TILE)
    row_held = (row < rows)[:, None]
    # Tiles may reach beyond the last panel: there they read it again.
    panel, lane = tl.minimum(output // PANEL, panels - 1), output % PANEL
    lane_at = panel.to(tl.int64) * steps * (PANEL * WORDS) + lane * WORDS
    codes += lane_at[:, None] + tl.arange(0, WORDS)[None, :]
    x += row.to(tl.int64)[:, None] * (steps * STEP) + tl.arange(0, STEP)[None, :]
    width, place = panels * PANEL, panel * PANEL + lane

    result = tl.zeros((ROWS, TILE), tl.float32)
    first = tl.program_id(1) * steps_per_split
    end = tl.minimum(first + steps_per_split, steps)
    # A step's scales are asked for one step before, which hides how long they take.
    at = first // GROUP_STEPS * width + place
    scale = tl.load(scales + at)
    if offsets is not None:
        offset = tl.load(offsets + at)
    for step in tl.range(first, end):
        inputs = tl.load(x + step * STEP, mask=row_held, other=0.0).to(DTYPE)
        word = tl.load(codes + step * (PANEL * WORDS))
        at = tl.minimum(step + 1, end - 1) // GROUP_STEPS * width + place
        next_scale = tl.load(scales + at)
        if offsets is not None:
            next_offset = tl.load(offsets + at)
        if BITS == 4:
            number = _nibbles(word, DTYPE)
        else:
            number = _bytes(word, DTYPE)
        if SCALE_PRODUCTS:
            product = tl.dot(inputs, number, input_precision=PRECISION)
            result += product * scale.to(tl.float32)[None, :]
            if offsets is not None:
                ones = tl.full((STEP, TILE), 1.0, DTYPE)
                total = tl.dot(inputs, ones, input_precision=PRECISION)
                result += total * offset.to(tl.float32)[None, :]
        else:
            weight = number.to(tl.float32) * scale.to(tl.float32)[None, :]
            if offsets is not None:
                weight += offset.to(tl.float32)[None, :]
            result = tl.dot(inputs, weight.to(DTYPE), result, input_precision=PRECISION)
        scale = next_scale
        if offsets is not None:
            offset = next_offset

    held = output < outputs
    if bias is not None:
        result += tl.load(bias + output, mask=held, other=0.0).to(tl.float32)[None, :]
    out += (tl.program_id(1).to(tl.int64) * rows + row)[:, None] * outputs + output[None, :]
    tl.store(out, result.to(out.dtype.element_ty), mask=row_held & held[None, :])


@triton.jit(do_not_specialize=["size", "splits"])
def add_kernel(
    out,  # [size], which is [rows, outputs]
    partials,  # float32 [splits, size]
    bias,  # [outputs] or None
    size,
    outputs,
    splits,
    TILE: tl.constexpr,
):
    """Grid: size / TILE. Adds in the order of the splits, then the bias."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    held = at < size
    result = tl.zeros((TILE,), tl.float32)
    partials += at
    for _ in tl.range(0, splits):
        result += tl.load(partials, mask=held, other=0.0)
        partials += size
    if bias is not None:
        result += tl.load(bias + at % outputs, mask=held, other=0.0).to(tl.float32)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=held)


@triton.jit
def _nibbles(word, DTYPE: tl.constexpr):
    """``[n, words]`` as ``[8 * words, n]``: codes less 8.

    Of 32 inputs, word ``t`` holds 16 j + 8 i + 2 t + h for i, j and h of 0 and 1: input (j, i, h)
    in the four bits from bit 16 h + 8 j + 4 i on.
    """
    low = tl.join(_pair(word, DTYPE), _pair(word >> 4, DTYPE))
    high = tl.join(_pair(word >> 8, DTYPE), _pair(word >> 12, DTYPE))
    number = tl.join(low, high)  # [n, words, h, i, j]
    number = tl.reshape(number, word.shape[0], word.shape[1] // 4, 4, 2, 2, 2)
    number = tl.permute(number, 0, 1, 5, 4, 2, 3)
    return tl.trans(tl.reshape(number, word.shape[0], word.shape[1] * 8))


@triton.jit
def _pair(word, DTYPE: tl.constexpr):
    """``[..., 2]``: what the last four bits of either half say, less 8.

    In 16 bits, it is the last bits of a number that is large enough: two by one instruction.
    """
    pair = word & 0x000F000F
    if DTYPE == tl.float32:
        low, high = _less(pair & 15, 8), _less(pair >> 16, 8)
    else:
        BASE: tl.constexpr = BFLOAT16_BASE if DTYPE == tl.bfloat16 else FLOAT16_BASE
        pair |= BFLOAT16_BITS if DTYPE == tl.bfloat16 else FLOAT16_BITS
        low = pair.to(tl.int16).to(DTYPE, bitcast=True) - (BASE + 8)
        high = (pair >> 16).to(tl.int16).to(DTYPE, bitcast=True) - (BASE + 8)
    return tl.join(low, high)


@triton.jit
def _bytes(word, DTYPE: tl.constexpr):
    """``[n, words]`` as ``[4 * words, n]``: codes less 128.

    Of 16 inputs, word ``t`` holds 8 i + 2 t + h, from bit 16 i + 8 h on.
    """
    low = tl.join(_less(word & 255, 128).to(DTYPE), _less(word >> 8 & 255, 128).to(DTYPE))
    high = tl.join(_less(word >> 16 & 255, 128).to(DTYPE), _less(word >> 24 & 255, 128).to(DTYPE))
    number = tl.join(low, high)  # [n, words, h, i]
    number = tl.reshape(number, word.shape[0], word.shape[1] // 4, 4, 2, 2)
    number = tl.permute(number, 0, 1, 4, 2, 3)
    return tl.trans(tl.reshape(number, word.shape[0], word.shape[1] * 4))


@triton.jit
def _less(code, ZERO: tl.constexpr):
    """``code - ZERO`` as float32, by way of ``2^23 + code``, whose last bits are the code."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (2.0**23 + ZERO)
