// Attention of a warp's query rows on tensor cores.
//
// K and V go from rows in memory to matrix fragments without a transposition and in loads of 16
// bytes. A product does not care in which order it sums: where a fragment wants dimensions 2t, 2t +
// 1, 2t + 8 and 2t + 9 of a key, lane t gives it dimensions that are neighbors in memory, and the
// queries are permuted alike. V needs pairs of tokens in one word, which two byte permutations make
// of two rows; the columns of its product may be any dimensions, so each lane takes neighbors too.
// The fewer bits an element has, the more neighbors a load brings, widened as they are used.
#pragma once
#include <codes.cuh>
#include <device.cuh>
#include <params.cuh>

// Within a warp: the row (and token of a key) 0..7, and the lane's place among its four.
__device__ inline int lane_group() {
    return threadIdx.x % WARP / 4;
}

__device__ inline int lane_place() {
    return threadIdx.x % 4;
}

// Neighbors that a lane reads in one load where `lanes` lanes share a row from dimension `first`
// on: 128 bits, or fewer where rows are not so aligned or not all lanes would find so many, but at
// least eight elements; else what is left of the row.
template <int BITS, int D>
__device__ constexpr int neighbors(int first, int lanes) {
    constexpr int ALIGNED = D * BITS & -(D * BITS);
    for (int n = min(128, ALIGNED) / BITS; n >= 8; n /= 2)
        if ((first / (lanes * n) + 1) * lanes * n <= D) return n;
    return D % (lanes * 8) / lanes;
}

// The first of the neighbors that lane i of `lanes` has in the words of dimensions `first` onward.
template <int BITS, int D>
__device__ constexpr int lane_dim(int first, int lanes, int i) {
    const int n = neighbors<BITS, D>(first, lanes);
    const int base = n < 8 ? D / (lanes * 8) * lanes * 8 : first / (lanes * n) * lanes * n;
    return base + i * n + (first - base) / lanes;
}

// The first of the two dimensions in word i of lane group g in a row of V.
template <typename K, int D>
__device__ constexpr int value_dim(int i, int g) {
    return lane_dim<K::BITS, D>(16 * i, 8, g);
}

// A lane's part of a key, from which it makes the words of 32 dimensions after the other.
template <typename K, int D>
struct Key {
    unsigned codes[4];
    typename K::Scale scale;

    // To be called before `words` for each `first`.
    __device__ void load(const Vector<K>& row, int first) {
        const int n = neighbors<K::BITS, D>(first, 4);
        if (first % (4 * n) && n >= 8) return;  // was loaded with those before
        scale = row.scale;
        const int at = lane_dim<K::BITS, D>(first, 4, lane_place()) * K::BITS / 8;
        for (int i = 0; i < 4; i++) codes[i] = K::ZEROS;
        if (row.at) ::load(codes, row.at + at, n * K::BITS);
    }

    // Two dimensions: word i of the lane's four, two where only 16 dimensions are left.
    template <typename T>
    __device__ unsigned word(int first, int i) const {
        constexpr int PAIRS = 16 / K::BITS;  // in a word of codes
        const int n = neighbors<K::BITS, D>(first, 4), pair = first % (4 * n) / 8 + i;
        return widened<T, K>(codes[pair / PAIRS], pair % PAIRS, scale);
    }
};

// A lane's part of a row of V.
template <typename K, int D>
struct Value {
    static constexpr int FULL = D / 64 * 64;       // dimensions whose codes fill words
    static constexpr int WORDS = FULL * K::BITS / 256;
    static constexpr int PAIRS = 16 / K::BITS;

    unsigned codes[WORDS + D % 64 / 16];
    typename K::Scale scale;

    __device__ void load(const Vector<K>& row, int g) {
        scale = row.scale;
#pragma unroll
        for (int i = 0; i < WORDS + D % 64 / 16; i++) codes[i] = K::ZEROS;
        if (!row.at) return;
#pragma unroll
        for (int first = 0; first < FULL; first += 64) {
            const int n = neighbors<K::BITS, D>(first, 8);
            if (first % (8 * n) == 0)
                ::load(&codes[first * K::BITS / 256], at(row, first / 16, g), n * K::BITS);
        }
#pragma unroll
        for (int i = FULL / 16; i < D / 16; i++)
            ::load(&codes[WORDS + i - FULL / 16], at(row, i, g), 2 * K::BITS);
    }

    __device__ static const char* at(const Vector<K>& row, int i, int g) {
        return row.at + value_dim<K, D>(i, g) * K::BITS / 8;
    }

    // The two dimensions of word i.
    template <typename T>
    __device__ unsigned word(int i) const {
        if (i >= FULL / 16) return widened<T, K>(codes[WORDS + i - FULL / 16], 0, scale);
        return widened<T, K>(codes[i / PAIRS], i % PAIRS, scale);
    }
};

// TILES times 16 query rows of a warp and the state of their softmax, for keys and values of format
// K. A lane has two rows of each tile, g and g + 8, and of their accumulators the dimensions
// value_dim(i, 2t + column) + odd in `accumulator[tile][2 * i + odd][2 * half + column]`.
template <typename T, typename K, int D, int TILES>
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
            load_query(words[i / 2][i % 2], row[i / 2][i % 2], 32 * c);
    }

    // The dimensions that the lane has of a key. Zeros for a null row.
    __device__ static void load_query(unsigned (&words)[4], const T* row, int first) {
#pragma unroll
        for (int i = 0; i < 4; i++) words[i] = 0;
        if (!row) return;
        const auto* at = (const char*)(row + lane_dim<K::BITS, D>(first, 4, lane_place()));
        load(words, at, first + 32 <= D ? 128 : 64);
    }

    // Products with N times 8 tokens; `key_of(n)` is the key of token 8n + g.
    template <int N, typename Of>
    __device__ void score(float (&scores)[N][TILES][4], Of key_of) {
        Key<K, D> key[N];
#pragma unroll
        for (int i = 0; i < N * TILES * 4; i++) scores[i / 4 / TILES][i / 4 % TILES][i % 4] = 0.0f;
#pragma unroll
        for (int c = 0; c < ceil_div(D, 32); c++) {
            auto& words = query[KEEP ? c : 0];
            if constexpr (!KEEP) load_query(words, c);
#pragma unroll
            for (int n = 0; n < N; n++) {
                key[n].load(key_of(n), 32 * c);
#pragma unroll
                for (int step = 0; step < 4 && 32 * c + 8 * step < D; step += 2) {
                    const unsigned b0 = key[n].template word<T>(32 * c, step);
                    const unsigned b1 = key[n].template word<T>(32 * c, step + 1);
#pragma unroll
                    for (int tile = 0; tile < TILES; tile++) {
                        const auto& w = words[tile];
                        const unsigned a[4] = {w[0][step], w[1][step], w[0][step + 1], w[1][step + 1]};
                        mma<T>(scores[n][tile], a, b0, b1);
                    }
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

    // Add 16 tokens: their weights in two fragments of 8, and the values of tokens 2t, 2t + 1,
    // 2t + 8 and 2t + 9.
    __device__ void accumulate(const float (&first)[TILES][4], const float (&second)[TILES][4],
                               const Value<K, D> (&value)[4]) {
        unsigned weights[TILES][4];
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            weights[tile][0] = pack<T>(first[tile][0], first[tile][1]);
            weights[tile][1] = pack<T>(first[tile][2], first[tile][3]);
            weights[tile][2] = pack<T>(second[tile][0], second[tile][1]);
            weights[tile][3] = pack<T>(second[tile][2], second[tile][3]);
        }
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            unsigned words[4];
#pragma unroll
            for (int token = 0; token < 4; token++) words[token] = value[token].template word<T>(i);
#pragma unroll
            for (int odd = 0; odd < 2; odd++) {
                const unsigned halves = odd ? 0x7632 : 0x5410;
                const unsigned b0 = __byte_perm(words[0], words[1], halves);
                const unsigned b1 = __byte_perm(words[2], words[3], halves);
#pragma unroll
                for (int tile = 0; tile < TILES; tile++)
                    mma<T>(accumulator[tile][2 * i + odd], weights[tile], b0, b1);
            }
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
