// Attention of a warp's query rows on tensor cores.
//
// K and V go from rows in memory to matrix fragments without a transposition and in loads of 16
// bytes. A product does not care in which order it sums: where a fragment wants dimensions 2t, 2t +
// 1, 2t + 8 and 2t + 9 of a key, lane t gives it dimensions that are neighbors in memory, and the
// queries are permuted alike. V needs pairs of tokens in one word, which two byte permutations make
// of two rows; the columns of its product may be any dimensions, so each lane takes neighbors too.
#pragma once
#include <device.cuh>
#include <params.cuh>

// Within a warp: the row (and token of a key) 0..7, and the lane's place among its four.
__device__ inline int lane_group() {
    return threadIdx.x % WARP / 4;
}

__device__ inline int lane_place() {
    return threadIdx.x % 4;
}

// Words of 32 dimensions of a key, or a query, from `first` on: lane t has dimensions first + 8t
// onward. Where only 16 are left, four a lane in the first two words. Zeros for a null row.
template <typename T, int D>
__device__ void load_key(unsigned (&words)[4], const T* row, int first, int t) {
    uint4 x = {0, 0, 0, 0};
    if (row && first + 32 <= D) x = *(const uint4*)(row + first + 8 * t);
    if (row && first + 32 > D) {
        const uint2 half = *(const uint2*)(row + first + 4 * t);
        x.x = half.x, x.y = half.y;
    }
    words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
}

// The first of the two dimensions in word i of lane group g in a row of V.
template <int D>
__device__ constexpr int value_dim(int i, int g) {
    constexpr int FULL = D / 64;  // chunks of 64 dimensions, 16 bytes a lane
    if (i < 4 * FULL) return i / 4 * 64 + 8 * g + i % 4 * 2;
    return FULL * 64 + g * (D % 64 / 8) + (i - 4 * FULL) * 2;
}

template <typename T, int D>
__device__ void load_value(unsigned (&words)[D / 16], const T* row, int g) {
#pragma unroll
    for (int c = 0; c < D / 64; c++) {
        uint4 x = {0, 0, 0, 0};
        if (row) x = *(const uint4*)(row + value_dim<D>(4 * c, g));
        words[4 * c] = x.x, words[4 * c + 1] = x.y, words[4 * c + 2] = x.z, words[4 * c + 3] = x.w;
    }
#pragma unroll
    for (int i = D / 64 * 4; i < D / 16; i++)
        words[i] = row ? *(const unsigned*)(row + value_dim<D>(i, g)) : 0;
}

// TILES times 16 query rows of a warp and the state of their softmax. A lane has two rows of each
// tile, g and g + 8, and of their accumulators the dimensions
// value_dim(i, 2t + column) + odd in `accumulator[tile][2 * i + odd][2 * half + column]`.
template <typename T, int D, int TILES>
struct Rows {
    // Queries stay in registers if these last, else they come from the L1 cache each time.
    static constexpr bool KEEP = D <= 128;

    const T* row[TILES][2];  // the lane's queries, null where there is none
    unsigned query[KEEP ? ceil_div(D, 32) : 1][TILES][2][4];
    float accumulator[TILES][D / 8][4];
    float maximum[TILES][2];
    float sum[TILES][2];  // of this lane's tokens until `finish`

    // `row_of(tile, half)` is the query of the lane's row there, null if there is none.
    template <typename Row>
    __device__ void start(Row row_of) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
#pragma unroll
            for (int half = 0; half < 2; half++) {
                row[tile][half] = row_of(tile, half);
                maximum[tile][half] = negative_infinity();
                sum[tile][half] = 0.0f;
            }
#pragma unroll
            for (int i = 0; i < D / 2; i++) accumulator[tile][i / 4][i % 4] = 0.0f;
        }
        if constexpr (KEEP)
#pragma unroll
            for (int c = 0; c < ceil_div(D, 32); c++) load_query(query[c], c);
    }

    __device__ void load_query(unsigned (&words)[TILES][2][4], int c) const {
#pragma unroll
        for (int i = 0; i < TILES * 2; i++)
            load_key<T, D>(words[i / 2][i % 2], row[i / 2][i % 2], 32 * c, lane_place());
    }

    // Products with N times 8 tokens; `key_of(n)` is the key of token 8n + g, null if there is none.
    template <int N, typename Key>
    __device__ void score(float (&scores)[N][TILES][4], Key key_of) {
#pragma unroll
        for (int i = 0; i < N * TILES * 4; i++) scores[i / 4 / TILES][i / 4 % TILES][i % 4] = 0.0f;
#pragma unroll
        for (int c = 0; c < ceil_div(D, 32); c++) {
            auto& words = query[KEEP ? c : 0];
            if constexpr (!KEEP) load_query(words, c);
#pragma unroll
            for (int n = 0; n < N; n++) {
                unsigned key[4];
                load_key<T, D>(key, key_of(n), 32 * c, lane_place());
#pragma unroll
                for (int step = 0; step < 4 && 32 * c + 8 * step < D; step += 2)
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        const auto& w = words[tile];
                        const unsigned a[4] = {w[0][step], w[1][step], w[0][step + 1], w[1][step + 1]};
                        mma<T>(scores[n][tile], a, key[step], key[step + 1]);
                    }
            }
        }
    }

    // Scores of N times 8 tokens become weights. `visible(tile, half, token)` says which count.
    template <int N, typename Visible>
    __device__ void weigh(float (&scores)[N][TILES][4], const AttentionParams& p, Visible visible) {
        cap(scores, p);
        bool grown = false;
        float top[TILES][2];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float best = maximum[tile][half];
#pragma unroll
                for (int i = 0; i < 2 * N; i++) {
                    float& x = scores[i / 2][tile][2 * half + i % 2];
                    const int token = i / 2 * 8 + 2 * lane_place() + i % 2;
                    x = visible(tile, half, token) ? x : negative_infinity();
                    best = fmaxf(best, x);
                }
                best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 1));
                best = fmaxf(best, __shfl_xor_sync(ALL_LANES, best, 2));
                grown |= best > maximum[tile][half];
                top[tile][half] = best;
            }
        // Maxima soon settle, and then there is nothing to rescale.
        if (__any_sync(ALL_LANES, grown)) rescale(top);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int i = 0; i < 4 * N; i++) {
                float& x = scores[i / 4][tile][i % 4];
                x = weight_of(x, maximum[tile][i % 4 / 2]);
                sum[tile][i % 4 / 2] += x;
            }
    }

    template <int N>
    __device__ void cap(float (&scores)[N][TILES][4], const AttentionParams& p) {
        if (p.softcap == 0.0f) {
#pragma unroll
            for (int i = 0; i < N * TILES * 4; i++)
                scores[i / 4 / TILES][i / 4 % TILES][i % 4] *= p.scale * LOG2E;
        } else {
#pragma unroll
            for (int i = 0; i < N * TILES * 4; i++) {
                float& x = scores[i / 4 / TILES][i / 4 % TILES][i % 4];
                x = capped(p, x);
            }
        }
    }

    __device__ void rescale(const float (&top)[TILES][2]) {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const float factor = weight_of(maximum[tile][half], top[tile][half]);
                maximum[tile][half] = top[tile][half];
                sum[tile][half] *= factor;
#pragma unroll
                for (int i = 0; i < D / 4; i++)
                    accumulator[tile][i / 2][2 * half + i % 2] *= factor;
            }
    }

    // Add 16 tokens: their weights in two fragments of 8, and the words of tokens 2t, 2t + 1,
    // 2t + 8 and 2t + 9 of their values.
    __device__ void accumulate(const float (&first)[TILES][4], const float (&second)[TILES][4],
                               const unsigned (&value)[4][D / 16]) {
        unsigned weights[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            weights[tile][0] = pack<T>(first[tile][0], first[tile][1]);
            weights[tile][1] = pack<T>(first[tile][2], first[tile][3]);
            weights[tile][2] = pack<T>(second[tile][0], second[tile][1]);
            weights[tile][3] = pack<T>(second[tile][2], second[tile][3]);
        }
#pragma unroll
        for (int i = 0; i < D / 16; i++)
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const unsigned halves = odd ? 0x7632 : 0x5410;
                const unsigned b0 = __byte_perm(value[0][i], value[1][i], halves);
                const unsigned b1 = __byte_perm(value[2][i], value[3][i], halves);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    mma<T>(accumulator[tile][2 * i + odd], weights[tile], b0, b1);
            }
    }

    // Complete the sums: until then each of a row's four lanes has the sum of its own tokens.
    __device__ void finish() {
#pragma unroll
        for (int tile = 0; tile < TILES; tile++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float& x = sum[tile][half];
                x += __shfl_xor_sync(ALL_LANES, x, 1);
                x += __shfl_xor_sync(ALL_LANES, x, 2);
            }
    }
};
