// Split-KV decoding (Dao et al., "Flash-Decoding", 2023): a thread block attends to one part of
// one context for the query heads of one KV head, which are rows of one product, so that K and V
// are read once. Keys and values go straight from the cache into registers.
#pragma once
#include <device.cuh>
#include <params.cuh>
#include <partial.cuh>
#include <tensor_core.cuh>

// Grid (sequences, num_kv_heads * tiles of 16 query heads, splits).
template <typename T, typename K, int D, int G, int BS>
__global__ void __launch_bounds__(THREADS) decode(const AttentionParams p) {
    constexpr int HEAD_TILES = ceil_div(G, 16), TOKENS = 16;  // a warp's at a time
    const int sequence = blockIdx.x, kv_head = blockIdx.y / HEAD_TILES;
    const int first_head = blockIdx.y % HEAD_TILES * 16;  // of the group
    const int g = lane_group(), t = lane_place(), lane = threadIdx.x % WARP;
    const int warp = threadIdx.x / WARP;
    const Split split = split_of(p, p.seq_lens[sequence], p.splits, blockIdx.z);
    if (split.begin >= split.end) return;
    const Context<K, D, BS> context(p, sequence, kv_head);

    Rows<T, K, D, 1> rows;
    const int head = kv_head * G + first_head;  // a decode's query is row `sequence` of q
    const T* query = (const T*)p.q + sequence * p.q_stride + (long long)head * D;
    rows.start([&](int, int half) {
        const int row = g + 8 * half;
        return first_head + row < G ? query + row * D : nullptr;
    });
    // Lane i knows the block of token i, and looks up the next one's while this one is read.
    const int step = WARPS * TOKENS;
    const auto look_up = [&](int at) {
        return at + lane % TOKENS < split.end ? context.block(at + lane % TOKENS) : 0;
    };
    int at = split.begin + warp * TOKENS, next = look_up(at);
    for (; at < split.end; at += step) {
        const int block = next;
        next = look_up(at + step);
        const auto key_of = [&](int token) -> Vector<K> {
            const int its_block = __shfl_sync(ALL_LANES, block, token);
            if (at + token >= split.end) return {};
            return context.key(its_block, at + token);
        };
        const auto value_of = [&](int token) -> Vector<K> {
            const int its_block = __shfl_sync(ALL_LANES, block, token);
            if (at + token >= split.end) return {};
            return context.value(its_block, at + token);
        };
        const Vector<K> key[2] = {key_of(g), key_of(8 + g)};
        Vector<K> row[4];
#pragma unroll
        for (int i = 0; i < 4; i++) row[i] = value_of(2 * t + i % 2 + i / 2 * 8);
        // What is loaded early arrives meanwhile, as far as registers last.
        Value<K, D> value[4];
        const auto load_values = [&] {
#pragma unroll
            for (int i = 0; i < 4; i++) value[i].load(row[i], g);
        };
        float scores[2][1][4];
        if constexpr (rows.KEEP) load_values();
        rows.template score<2>(scores, [&](int n) { return key[n]; });
        rows.template weigh<2>(scores, p, [&](int, int, int token) { return at + token < split.end; });
        if constexpr (!rows.KEEP) load_values();
        rows.accumulate(scores[0], scores[1], value);
    }
    rows.finish();

    auto& sum = shared_memory<Sum<16, D>>();
    for (int half = 0; half < 2; half++)
        if (t == 0) {
            sum.maximum[warp][g + 8 * half] = rows.maximum[0][half];
            sum.sum[warp][g + 8 * half] = rows.sum[0][half];
        }
    __syncthreads();
    for (int turn = 0; turn < WARPS; turn++) {
        if (turn == warp) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const int row = g + 8 * half;
                const float factor = weight_of(rows.maximum[0][half], sum.top(row));
#pragma unroll
                for (int i = 0; i < D / 4; i++) {  // word, column, odd
                    const int dim = value_dim<K, D>(i / 4, 2 * t + i / 2 % 2) + i % 2;
                    const float x =
                        rows.accumulator[0][i / 4 * 2 + i % 2][2 * half + i / 2 % 2] * factor;
                    float& all = sum.accumulator[row][dim];
                    all = turn == 0 ? x : all + x;
                }
            }
        }
        __syncthreads();
    }
    write(p, sum, min(16, G - first_head), (T*)p.out + sequence * p.out_stride, sequence, head,
          p.num_kv_heads * G, split, blockIdx.z);
}
