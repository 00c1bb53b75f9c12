// Attention in float32, which tensor cores do not multiply at full precision: one query token per
// thread block, decodes and prefills alike. A warp takes 32 tokens at a time: first a lane has a
// token and computes its scores, then a lane has dimensions and adds up the values.
#pragma once
#include <device.cuh>
#include <params.cuh>
#include <partial.cuh>

template <typename K, int HEADS, int D>
struct PlainShared {
    alignas(16) float query[HEADS][D];
    Vector<K> value[WARPS][WARP];  // of each of the tokens at hand
    float weight[WARPS][HEADS][WARP];
    Sum<HEADS, D> sum;
};

__device__ inline float dot(const float4& a, const float4& b) {
    return a.x * b.x + a.y * b.y + a.z * b.z + a.w * b.w;
}

// Elements 4i .. 4i + 3 for all i of `x`, from `from` on.
template <typename K, int N>
__device__ void read(float4 (&x)[N], const Vector<K>& row, int from) {
    unsigned words[4];
    if constexpr (K::CODED) {
        load(words, row.at + from * K::BITS / 8, 4 * N * K::BITS);
#pragma unroll
        for (int i = 0; i < N; i++) {
            constexpr int PAIRS = 16 / K::BITS;  // in a word
            const float2 first = K::pair(words[2 * i / PAIRS], 2 * i % PAIRS, row.scale);
            const float2 second = K::pair(words[2 * i / PAIRS], 2 * i % PAIRS + 1, row.scale);
            x[i] = float4{first.x, first.y, second.x, second.y};
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i++) x[i] = ((const float4*)row.at)[from / 4 + i];
    }
}

// Grid (query tokens, num_kv_heads * tiles of 8 query heads, splits; 1 for prefills). Two thread
// blocks per multiprocessor are enough; for more, ptxas would spill.
template <typename K, int D, int G, int BS>
__global__ void __launch_bounds__(THREADS, 2) plain(const AttentionParams p) {
    constexpr int HEADS = G < 8 ? G : 8, HEAD_TILES = ceil_div(G, HEADS);
    constexpr int VECTORS = D / 4;  // of 16 bytes in a value, which so many lanes read together:
    constexpr int LANES = VECTORS > WARP ? WARP : power_of_two_from(VECTORS);
    constexpr int EACH = ceil_div(VECTORS, LANES), SETS = WARP / LANES;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    const int kv_head = blockIdx.y / HEAD_TILES, first_head = blockIdx.y % HEAD_TILES * HEADS;
    const int count = min(HEADS, G - first_head), head = kv_head * G + first_head;
    int sequence = blockIdx.x, token = blockIdx.x, length;
    if (p.work) {
        sequence = p.work[2 * blockIdx.x];
        const int row = p.work[2 * blockIdx.x + 1] / G, start = p.query_start[sequence];
        token = start + row;
        length = p.seq_lens[sequence] - (p.query_start[sequence + 1] - start) + row + 1;
    } else {
        length = p.seq_lens[sequence];
    }
    const Split split = split_of(p, length, gridDim.z, blockIdx.z);
    if (split.begin >= split.end) return;
    const Context<K, D, BS> context(p, sequence, kv_head);

    auto& shared = shared_memory<PlainShared<K, HEADS, D>>();
    const float* query = (const float*)p.q + token * p.q_stride + (long long)head * D;
    for (int i = threadIdx.x; i < HEADS * D; i += THREADS)
        shared.query[i / D][i % D] = i / D < count ? query[i] : 0.0f;
    __syncthreads();

    float4 accumulator[HEADS][EACH];
    float maximum[HEADS], sum[HEADS];  // the sums are of this lane's tokens
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        maximum[h] = negative_infinity();
        sum[h] = 0.0f;
#pragma unroll
        for (int i = 0; i < EACH; i++) accumulator[h][i] = float4{0, 0, 0, 0};
    }
    for (int at = split.begin + warp * WARP; at < split.end; at += THREADS) {
        const int position = at + lane;
        float score[HEADS];
#pragma unroll
        for (int h = 0; h < HEADS; h++) score[h] = 0.0f;
        if (position < split.end) {
            const int block = context.block(position);
            const Vector<K> key = context.key(block, position);
            shared.value[warp][lane] = context.value(block, position);
#pragma unroll 1
            for (int at = 0; at < D; at += 16) {
                float4 x[4];
                read<K>(x, key, at);
#pragma unroll
                for (int i = 0; i < 4; i++)
#pragma unroll
                    for (int h = 0; h < HEADS; h++)
                        score[h] += dot(x[i], ((const float4*)shared.query[h])[at / 4 + i]);
            }
        }
#pragma unroll
        for (int h = 0; h < HEADS; h++) {
            const float x = position < split.end ? logit(p, score[h]) : negative_infinity();
            float top = fmaxf(maximum[h], x);
            for (int other = 1; other < WARP; other *= 2)
                top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, other));
            const float factor = weight_of(maximum[h], top), weight = weight_of(x, top);
            maximum[h] = top;
            sum[h] = sum[h] * factor + weight;
            shared.weight[warp][h][lane] = weight;
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                float4& all = accumulator[h][i];
                all.x *= factor, all.y *= factor, all.z *= factor, all.w *= factor;
            }
        }
        __syncwarp();
        const int tokens = min(WARP, split.end - at);
#pragma unroll 4
        for (int other = lane / LANES; other < tokens; other += SETS) {
            const Vector<K> value = shared.value[warp][other];
#pragma unroll
            for (int i = 0; i < EACH; i++) {
                const int vector = lane % LANES + i * LANES;
                if (vector >= VECTORS) continue;
                float4 one[1];
                read<K>(one, value, 4 * vector);
                const float4 x = one[0];
#pragma unroll
                for (int h = 0; h < HEADS; h++) {
                    const float weight = shared.weight[warp][h][other];
                    float4& all = accumulator[h][i];
                    all.x += weight * x.x, all.y += weight * x.y;
                    all.z += weight * x.z, all.w += weight * x.w;
                }
            }
        }
        __syncwarp();
    }
    // First the sets of lanes within a warp, then the warps.
#pragma unroll
    for (int h = 0; h < HEADS; h++) {
        for (int other = 1; other < WARP; other *= 2)
            sum[h] += __shfl_xor_sync(ALL_LANES, sum[h], other);
#pragma unroll
        for (int i = 0; i < EACH * 4; i++) {
            float& x = (&accumulator[h][i / 4].x)[i % 4];
            for (int other = LANES; other < WARP; other *= 2)
                x += __shfl_xor_sync(ALL_LANES, x, other);
        }
        if (lane == 0) {
            shared.sum.maximum[warp][h] = maximum[h];
            shared.sum.sum[warp][h] = sum[h];
        }
    }
    __syncthreads();
    for (int turn = 0; turn < WARPS; turn++) {
        if (turn == warp && lane < LANES) {
#pragma unroll
            for (int h = 0; h < HEADS; h++) {
                const float factor = weight_of(maximum[h], shared.sum.top(h));
#pragma unroll
                for (int i = 0; i < EACH * 4; i++) {
                    const int dim = (lane + i / 4 * LANES) * 4 + i % 4;
                    if (dim >= D) continue;
                    const float x = (&accumulator[h][i / 4].x)[i % 4] * factor;
                    float& all = shared.sum.accumulator[h][dim];
                    all = turn == 0 ? x : all + x;
                }
            }
        }
        __syncthreads();
    }
    write(p, shared.sum, count, (float*)p.out + token * p.out_stride, sequence, head,
          p.num_kv_heads * G, split, blockIdx.z);
}
