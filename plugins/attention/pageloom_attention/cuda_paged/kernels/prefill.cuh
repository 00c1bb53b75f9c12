// Prefill after FlashAttention-2 (Dao, 2023): whole prompts, chunks, and what follows a cached
// prefix. The query tokens and query heads of a KV head are rows of one product; a thread block
// takes 64 * TILES rows and brings K and V into shared memory, one while it computes with the
// other.
#pragma once
#include <device.cuh>
#include <params.cuh>
#include <tensor_core.cuh>

// Bytes from one row to the next, such that the loads of 16 bytes meet no bank conflict: a
// quarter of a warp reads 2 rows x 64 bytes of K, and 4 even rows x 32 bytes of V.
template <int D>
__host__ __device__ constexpr int key_stride() {
    return (2 * D + 63) / 128 * 128 + 64;
}

template <int D>
__host__ __device__ constexpr int value_stride() {
    return 2 * D + 16;  // D is a multiple of 16: 16 or 48 more than a multiple of 64
}

template <int D>
struct Tile {
    static constexpr int TOKENS = D > 128 ? 32 : 64;
    alignas(16) char keys[TOKENS][key_stride<D>()];
    alignas(16) char values[TOKENS][value_stride<D>()];
};

// Start to bring tokens `at` onward, zeros from `end` on.
template <typename T, int D, int BS, int STRIDE>
__device__ void fetch(char (*rows)[STRIDE], const Context<T, D, BS>& context, long long offset,
                      int at, int end) {
    constexpr int VECTORS = D / 8;
    for (int i = threadIdx.x; i < Tile<D>::TOKENS * VECTORS; i += THREADS) {
        const int row = i / VECTORS, vector = i % VECTORS, position = at + row;
        const T* source = context.keys;
        if (position < end) source = context.key(context.block(position), position) + offset;
        copy_start(rows[row] + 16 * vector, source + 8 * vector, position < end);
    }
}

// Grid (work items, num_kv_heads).
template <typename T, int D, int G, int BS, int TILES>
__global__ void __launch_bounds__(THREADS) prefill(const AttentionParams p) {
    constexpr int ROWS = 16 * TILES * WARPS, TOKENS = Tile<D>::TOKENS;
    const int sequence = p.work[2 * blockIdx.x], first = p.work[2 * blockIdx.x + 1];
    const int kv_head = blockIdx.y, warp = threadIdx.x / WARP, g = lane_group(), t = lane_place();
    const int start = p.query_start[sequence], length = p.seq_lens[sequence];
    const int num_rows = (p.query_start[sequence + 1] - start) * G;
    const int before = length - num_rows / G;  // the position of the first query token
    const Context<T, D, BS> context(p, sequence, kv_head);
    const auto low_of = [&](int position) {
        return p.window && position >= p.window ? position - p.window + 1 : 0;
    };
    const int begin = low_of(before + first / G);
    const int end = before + (min(first + ROWS, num_rows) - 1) / G + 1;

    // Row r is query head r % G of its group in query token r / G.
    const auto row_of = [&](int tile, int half) {
        return first + (warp * TILES + tile) * 16 + half * 8 + g;
    };
    const auto offset_of = [&](int row, long long stride) {
        return (start + row / G) * stride + (long long)(kv_head * G + row % G) * D;
    };
    Rows<T, D, TILES> rows;
    int position[TILES][2];
    rows.start([&](int tile, int half) {
        const int row = row_of(tile, half);
        position[tile][half] = before + min(row, num_rows - 1) / G;
        return row < num_rows ? (const T*)p.q + offset_of(row, p.q_stride) : nullptr;
    });
    const int warp_first = first + warp * TILES * 16;
    const bool warp_has_rows = warp_first < num_rows;
    const int warp_last = before + (min(warp_first + TILES * 16, num_rows) - 1) / G;

    auto& tile = shared_memory<Tile<D>>();
    fetch<T, D, BS>(tile.keys, context, 0, begin, end);
    copy_commit();
    fetch<T, D, BS>(tile.values, context, context.values, begin, end);
    copy_commit();
    for (int at = begin; at < end; at += TOKENS) {
        const bool seen = warp_has_rows && at <= warp_last;
        float scores[TOKENS / 8][TILES][4];
        copy_wait<1>();
        __syncthreads();
        if (seen)
            rows.template score<TOKENS / 8>(
                scores, [&](int n) { return (const T*)tile.keys[8 * n + g]; });
        __syncthreads();
        fetch<T, D, BS>(tile.keys, context, 0, at + TOKENS, end);
        copy_commit();
        if (seen)
            rows.template weigh<TOKENS / 8>(scores, p, [&](int i, int half, int token) {
                const int last = position[i][half];
                return at + token <= last && at + token >= low_of(last);
            });
        copy_wait<1>();
        __syncthreads();
        if (seen) {
#pragma unroll
            for (int n = 0; n < TOKENS / 16; n++) {
                unsigned value[4][D / 16];
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const int token = 16 * n + 2 * t + i % 2 + i / 2 * 8;
                    load_value<T, D>(value[i], (const T*)tile.values[token], g);
                }
                rows.accumulate(scores[2 * n], scores[2 * n + 1], value);
            }
        }
        __syncthreads();
        fetch<T, D, BS>(tile.values, context, context.values, at + TOKENS, end);
        copy_commit();
    }
    rows.finish();

#pragma unroll
    for (int i = 0; i < TILES * 2; i++) {
        const int row = row_of(i / 2, i % 2), half = i % 2;
        if (row >= num_rows) continue;
        const float factor = normalizer(p, kv_head * G + row % G, rows.maximum[i / 2][half],
                                        rows.sum[i / 2][half]);
        T* out = (T*)p.out + offset_of(row, p.out_stride);
#pragma unroll
        for (int word = 0; word < D / 16; word++)
#pragma unroll
            for (int column = 0; column < 2; column++)
                store_pair(out + value_dim<D>(word, 2 * t + column),
                           rows.accumulator[i / 2][2 * word][2 * half + column] * factor,
                           rows.accumulator[i / 2][2 * word + 1][2 * half + column] * factor);
    }
}
