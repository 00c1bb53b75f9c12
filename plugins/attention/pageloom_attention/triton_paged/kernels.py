# ruff: noqa: N803  (constants are in capitals, as is usual in kernels)
# mypy: disable-error-code="no-untyped-def,untyped-decorator"
"""The kernels: store, attend, merge.

A KV head's query heads times a sequence's query tokens are the *rows* of one matrix product, so
that K and V are read once for all of them and a decode fills tensor-core rows too; row r of a
sequence is head ``r % GROUP`` of its token ``r // GROUP``. The softmax is computed online, in base
2 (Milakov and Gimelshein, 2018; Dao et al., FlashAttention, 2022). Where a step has too few rows
to fill the chip, the tokens of a row are split over programs, whose partial results `merge_kernel`
adds up (Dao et al., Flash-Decoding, 2023).

K and V each lie as ``[block, KV head, slot, element]``, or coded as `formats` says. Coded ones are
multiplied as the small numbers that their codes are, which every matrix unit takes without loss:
their scales multiply scores and weights, of which there are fewer.

Under ``TRITON_INTERPRET=1`` these run on a CPU. The interpreter keeps bfloat16 as integers, so
there ``DTYPE`` is float32 and everything is converted as it is loaded.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pageloom_attention.triton_paged.formats import load_codes, load_scales, store_vectors

LOG2E = tl.constexpr(1.4426950408889634)
# Below every score, and yet finite: what a row that has seen nothing yet has as its maximum.
LOWEST = tl.constexpr(-1e30)


@triton.jit
def _load_rotated(vectors, cos, sin, element, mask, HEAD_SIZE: tl.constexpr):
    """``[n, WIDTH]``: each vector rotated by its row of ``cos`` and ``sin``; all are pointers
    ``[n, 1]``.

    What an element is paired with is half a head away, and so is loaded a second time, from the L1
    cache.
    """
    across = tl.where(element < HEAD_SIZE // 2, element + HEAD_SIZE // 2, element - HEAD_SIZE // 2)
    x = tl.load(vectors + element, mask=mask, other=0.0).to(tl.float32)
    x *= tl.load(cos + element, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(vectors + across, mask=mask, other=0.0).to(tl.float32)
    x += other * tl.load(sin + element, mask=mask, other=0.0).to(tl.float32)
    return x.to(vectors.dtype.element_ty)


@triton.jit
def _rotate(
    q,
    q_row,
    cos,
    sin,
    first,
    num_tokens,
    HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rotate vectors ``first : first + VECTORS`` of q in place."""
    middle: tl.constexpr = HEAD_SIZE // 2
    vector = first + tl.arange(0, VECTORS)
    token, head = (vector // HEADS).to(tl.int64)[:, None], (vector % HEADS)[:, None]
    element = tl.arange(0, WIDTH // 2)[None, :]
    mask = (token < num_tokens) & (element < middle)
    at = q + token * q_row + head * HEAD_SIZE + element
    turn = token * HEAD_SIZE + middle + element
    left = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    right = tl.load(at + middle, mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cos + turn, mask=mask, other=0.0).to(tl.float32)
    s = tl.load(sin + turn, mask=mask, other=0.0).to(tl.float32)
    tl.store(at, (left * c - right * s).to(q.dtype.element_ty), mask=mask)
    tl.store(at + middle, (right * c + left * s).to(q.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["slots", "num_tokens"])
def store_kernel(
    k,  # [num_tokens, KV_HEADS, HEAD_SIZE], rows strided by k_row elements
    v,
    keys,
    values,
    slots,  # int64 [num_tokens]
    num_tokens,
    k_row,
    v_row,
    k_inverse,  # of the scale, if that is a constant
    v_inverse,
    q,  # [num_tokens, GROUP * KV_HEADS, HEAD_SIZE], or None where nothing is to be rotated
    q_row,
    cos,  # [num_tokens, HEAD_SIZE]
    sin,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,  # elements of a vector in the cache, without its scale
    ELEMENT: tl.constexpr,  # `VectorLayout.element`, or None
    SCALED: tl.constexpr,  # whether each vector has a scale
    LIMIT: tl.constexpr,  # the largest code
    MOST: tl.constexpr,  # the largest number that is coded
    VECTORS: tl.constexpr,  # per program
    WIDTH: tl.constexpr,  # the power of 2 that holds a vector
):
    """Grid: vectors of K / VECTORS, and behind those, if there is a q, its vectors / VECTORS."""
    if q is not None:
        program = tl.program_id(0) - tl.cdiv(num_tokens * KV_HEADS, VECTORS)
        if program >= 0:
            _rotate(
                q, q_row, cos, sin, program * VECTORS, num_tokens, GROUP * KV_HEADS, HEAD_SIZE,
                VECTORS, WIDTH,
            )  # fmt: skip
            return
    vector = tl.program_id(0) * VECTORS + tl.arange(0, VECTORS)
    token, head = (vector // KV_HEADS).to(tl.int64), vector % KV_HEADS
    held = token < num_tokens
    slot = tl.load(slots + token, mask=held, other=0)
    part = slot // BLOCK_SIZE * KV_HEADS + head
    element = tl.arange(0, WIDTH)[None, :]
    mask = held[:, None] & (element < HEAD_SIZE)
    source = head[:, None] * HEAD_SIZE + element
    if q is None:
        new = tl.load(k + token[:, None] * k_row + source, mask=mask, other=0.0)
    else:
        turn = token[:, None] * HEAD_SIZE
        vectors = k + token[:, None] * k_row + head[:, None] * HEAD_SIZE
        new = _load_rotated(vectors, cos + turn, sin + turn, element, mask, HEAD_SIZE)
    store_vectors(
        keys, new, part, slot % BLOCK_SIZE, held, k_inverse, HEAD_SIZE, BLOCK_SIZE, ROW,
        WIDTH, ELEMENT, SCALED, LIMIT, MOST,
    )  # fmt: skip
    new = tl.load(v + token[:, None] * v_row + source, mask=mask, other=0.0)
    store_vectors(
        values, new, part, slot % BLOCK_SIZE, held, v_inverse, HEAD_SIZE, BLOCK_SIZE, ROW,
        WIDTH, ELEMENT, SCALED, LIMIT, MOST,
    )  # fmt: skip


@triton.jit
def _attend_tile(
    result,
    top,
    total,
    q,
    q_sum,
    keys,
    values,
    table,
    first,
    end,
    position,
    kv_head,
    scale,
    cap,
    KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,
    ELEMENT: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,
    UNIT: tl.constexpr,
    WINDOW: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attend to tokens ``first : first + TILE``, all of which all rows see unless MASKED."""
    token = first + tl.arange(0, TILE)
    inside = token < end
    if MASKED:
        block = tl.load(table + token // BLOCK_SIZE, mask=inside, other=0)
    else:
        block = tl.load(table + token // BLOCK_SIZE)
    part, slot = block.to(tl.int64) * KV_HEADS + kv_head, token % BLOCK_SIZE
    k = load_codes(
        keys, part, slot, inside, BLOCK_SIZE, ROW, WIDTH, ELEMENT, SCALED, NATIVE, DTYPE, MASKED,
        True,
    )  # fmt: skip
    v = load_codes(
        values, part, slot, inside, BLOCK_SIZE, ROW, WIDTH, ELEMENT, SCALED, NATIVE, DTYPE, MASKED,
        False,
    )  # fmt: skip

    score = tl.dot(q, k, input_precision=PRECISION)
    if SCALED:
        k_scale, k_added = load_scales(keys, part, slot, inside, BLOCK_SIZE, ROW, ELEMENT, MASKED)
        score *= (k_scale * scale)[None, :]
        if ELEMENT == "int4":
            score += q_sum[:, None] * (k_added * scale)[None, :]
    else:
        score *= scale
    if cap is not None:
        score = cap - 2 * cap / (tl.exp2(score) + 1)  # a hyperbolic tangent
    if MASKED:
        age = position[:, None] - token[None, :]
        seen = (age >= 0) & inside[None, :]
        if WINDOW is not None:
            seen &= age < WINDOW
        score = tl.where(seen, score, float("-inf"))

    higher = tl.maximum(top, tl.max(score, 1))
    weight = tl.exp2(score - higher[:, None])
    fade = tl.exp2(top - higher)
    total = total * fade + tl.sum(weight, 1)
    result *= fade[:, None]
    if SCALED:
        v_scale, v_added = load_scales(values, part, slot, inside, BLOCK_SIZE, ROW, ELEMENT, MASKED)
        if ELEMENT == "int4":
            result += tl.sum(weight * (v_added * UNIT)[None, :], 1)[:, None]
        weight *= (v_scale * UNIT)[None, :]
    result = tl.dot(weight.to(DTYPE), v, result, input_precision=PRECISION)
    return result, higher, total


@triton.jit(do_not_specialize=["items", "block_tables", "sinks", "table_row"])
def attend_kernel(
    out,  # [T, KV_HEADS * GROUP, HEAD_SIZE], rows strided by out_row elements
    partials,  # float32 [slots, KV_HEADS, ROWS, HEAD_SIZE]
    stats,  # float32 [slots, KV_HEADS, ROWS, 2]
    q,  # like out, rows strided by q_row elements
    keys,
    values,
    items,  # int32 [items, 8], see `work.Work`
    block_tables,  # int32, rows strided by table_row elements
    sinks,  # floating [KV_HEADS * GROUP], or None
    q_row,
    out_row,
    table_row,
    scale,  # of the scores, to base 2
    cap,  # softcap to base 2, or None; with it, scale gives twice the argument of the tanh
    v_scale,  # multiplies results, or None
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROW: tl.constexpr,  # as in `store_kernel`
    ELEMENT: tl.constexpr,
    SCALED: tl.constexpr,
    NATIVE: tl.constexpr,  # whether the GPU converts fp8 itself
    UNIT: tl.constexpr,  # multiplies the scales of V
    WINDOW: tl.constexpr,  # tokens, or None
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    WIDTH: tl.constexpr,
    DTYPE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: items, KV heads."""
    item = items + tl.program_id(0) * 8
    row, row_end = tl.load(item + 1), tl.load(item + 2)
    if row >= row_end:
        return
    table = block_tables + tl.load(item).to(tl.int64) * table_row
    shift, start, end = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    slot, split = tl.load(item + 6), tl.load(item + 7)
    kv_head = tl.program_id(1)

    index = tl.arange(0, ROWS)
    rows = row + index
    held = rows < row_end
    query = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    position = query + shift
    element = tl.arange(0, WIDTH)[None, :]
    mask = held[:, None] & (element < HEAD_SIZE)
    pointers = q + query.to(tl.int64)[:, None] * q_row + head[:, None] * HEAD_SIZE + element
    queries = tl.load(pointers, mask=mask, other=0.0).to(DTYPE)
    q_sum = tl.sum(queries.to(tl.float32), 1)  # for what int4 adds to every element of K

    result = tl.zeros((ROWS, WIDTH), tl.float32)
    top = tl.full((ROWS,), LOWEST, tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + head, mask=held, other=0.0).to(tl.float32) * LOG2E
        sink = tl.where(split == 0, sink, float("-inf"))
        top = tl.maximum(top, sink)
        total = tl.exp2(sink - top)

    masked = start
    if WINDOW is None:
        # Every row sees what the first row sees.
        plain = tl.minimum(row // GROUP + shift + 1, end) - start
        masked += tl.maximum(plain, 0) // TILE * TILE
        for first in tl.range(start, masked, TILE):
            result, top, total = _attend_tile(
                result, top, total, queries, q_sum, keys, values, table, first, end, position,
                kv_head, scale, cap, KV_HEADS, BLOCK_SIZE, ROW, ELEMENT, SCALED, NATIVE, UNIT,
                WINDOW, TILE, WIDTH, DTYPE, PRECISION, False,
            )  # fmt: skip
    for first in tl.range(masked, end, TILE):
        result, top, total = _attend_tile(
            result, top, total, queries, q_sum, keys, values, table, first, end, position,
            kv_head, scale, cap, KV_HEADS, BLOCK_SIZE, ROW, ELEMENT, SCALED, NATIVE, UNIT,
            WINDOW, TILE, WIDTH, DTYPE, PRECISION, True,
        )  # fmt: skip

    if v_scale is not None:
        result *= v_scale
    if slot < 0:
        pointers = out + query.to(tl.int64)[:, None] * out_row + head[:, None] * HEAD_SIZE + element
        tl.store(pointers, (result / total[:, None]).to(out.dtype.element_ty), mask=mask)
    else:
        part = (slot * KV_HEADS + kv_head) * ROWS + index
        tl.store(partials + part.to(tl.int64)[:, None] * HEAD_SIZE + element, result, mask=mask)
        tl.store(stats + part * 2, top, mask=held)
        tl.store(stats + part * 2 + 1, total, mask=held)


@triton.jit(do_not_specialize=["merges"])
def merge_kernel(
    out,
    partials,
    stats,
    merges,  # int32 [merges, 4], see `work.Work`
    out_row,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLITS: tl.constexpr,  # added up at a time
):
    """Grid: merges, KV heads, rows of a tile."""
    item = merges + tl.program_id(0) * 4
    row = tl.load(item) + tl.program_id(2)
    if row >= tl.load(item + 1):
        return
    slot, count = tl.load(item + 2), tl.load(item + 3)
    kv_head = tl.program_id(1)
    element = tl.arange(0, WIDTH)
    within = element < HEAD_SIZE
    result = tl.zeros((WIDTH,), tl.float32)
    top = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    for first in tl.range(0, count, SPLITS):
        split = first + tl.arange(0, SPLITS)
        held = split < count
        part = ((slot + split) * KV_HEADS + kv_head) * ROWS + tl.program_id(2)
        tops = tl.load(stats + part * 2, mask=held, other=float("-inf"))
        totals = tl.load(stats + part * 2 + 1, mask=held, other=0.0)
        pointers = partials + part.to(tl.int64)[:, None] * HEAD_SIZE + element[None, :]
        results = tl.load(pointers, mask=held[:, None] & within[None, :], other=0.0)
        higher = tl.maximum(top, tl.max(tops, 0))
        weight = tl.exp2(tops - higher)
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(totals * weight, 0)
        result = result * fade + tl.sum(results * weight[:, None], 0)
        top = higher
    query, head = row // GROUP, kv_head * GROUP + row % GROUP
    pointers = out + query.to(tl.int64) * out_row + head * HEAD_SIZE + element
    tl.store(pointers, (result / total).to(out.dtype.element_ty), mask=within)
