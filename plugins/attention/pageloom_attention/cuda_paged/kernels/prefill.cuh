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

// Brings keys or values of format K into shared memory as rows of T: `start` begins with those of
// tokens `at` onward, zeros from `end` on, and after `land` this thread's part is there. Codes
// travel through registers, where they are widened.
template <typename T, typename K, int D, int STRIDE>
struct Fetch {
    static constexpr int PIECES = D / 16, WORDS = K::BITS / 2;  // a piece is 16 elements
    static constexpr int EACH = ceil_div(Tile<D>::TOKENS * PIECES, THREADS);

    char (*rows)[STRIDE];
    unsigned codes[EACH][WORDS];
    typename K::Scale scale[EACH];

    __device__ Fetch(char (*rows)[STRIDE]) : rows(rows) {}

    template <typename Of>
    __device__ void start(Of vector_of, int at, int end) {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int piece = threadIdx.x + i * THREADS, position = at + piece / PIECES;
#pragma unroll
            for (int word = 0; word < WORDS; word++) codes[i][word] = K::ZEROS;
            scale[i] = {};
            if (piece >= Tile<D>::TOKENS * PIECES || position >= end) continue;
            const Vector<K> vector = vector_of(position);
            scale[i] = vector.scale;
            load(codes[i], vector.at + piece % PIECES * WORDS * 4, WORDS * 32);
        }
    }

    __device__ void land() {
#pragma unroll
        for (int i = 0; i < EACH; i++) {
            const int piece = threadIdx.x + i * THREADS;
            if (piece >= Tile<D>::TOKENS * PIECES) continue;
            unsigned words[8];
#pragma unroll
            for (int j = 0; j < 8; j++)
                words[j] = widened<T, K>(codes[i][j * WORDS / 8], j % (8 / WORDS), scale[i]);
            auto* target = (uint4*)(rows[piece / PIECES] + piece % PIECES * 32);
            target[0] = uint4{words[0], words[1], words[2], words[3]};
            target[1] = uint4{words[4], words[5], words[6], words[7]};
        }
    }
};

// Two of these may be on their way; `land` waits for the one that was started first.
template <typename T, int D, int STRIDE>
struct Fetch<T, Raw<T>, D, STRIDE> {
    char (*rows)[STRIDE];

    __device__ Fetch(char (*rows)[STRIDE]) : rows(rows) {}

    template <typename Of>
    __device__ void start(Of vector_of, int at, int end) {
        constexpr int PIECES = D / 8;  // of 16 bytes
        for (int i = threadIdx.x; i < Tile<D>::TOKENS * PIECES; i += THREADS) {
            const int row = i / PIECES, piece = i % PIECES, position = at + row;
            // An address even where nothing is read.
            const char* source = vector_of(position < end ? position : end - 1).at;
            copy_start(rows[row] + 16 * piece, source + 16 * piece, position < end);
        }
        copy_commit();
    }

    __device__ void land() {
        copy_wait<1>();
    }
};

// Grid (work items, num_kv_heads).
template <typename T, typename K, int D, int G, int BS, int TILES>
__global__ void __launch_bounds__(THREADS) prefill(const AttentionParams p) {
    constexpr int ROWS = 16 * TILES * WARPS, TOKENS = Tile<D>::TOKENS;
    const int sequence = p.work[2 * blockIdx.x], first = p.work[2 * blockIdx.x + 1];
    const int kv_head = blockIdx.y, warp = threadIdx.x / WARP, g = lane_group(), t = lane_place();
    const int start = p.query_start[sequence], length = p.seq_lens[sequence];
    const int num_rows = (p.query_start[sequence + 1] - start) * G;
    const int before = length - num_rows / G;  // the position of the first query token
    const Context<K, D, BS> context(p, sequence, kv_head);
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
    Rows<T, Raw<T>, D, TILES> rows;
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
    Fetch<T, K, D, key_stride<D>()> keys(tile.keys);
    Fetch<T, K, D, value_stride<D>()> values(tile.values);
    const auto key_of = [&](int at) { return context.key(context.block(at), at); };
    const auto value_of = [&](int at) { return context.value(context.block(at), at); };
    keys.start(key_of, begin, end);
    values.start(value_of, begin, end);
    for (int at = begin; at < end; at += TOKENS) {
        const bool seen = warp_has_rows && at <= warp_last;
        float scores[TOKENS / 8][TILES][4];
        keys.land();
        __syncthreads();
        if (seen)
            rows.template score<TOKENS / 8>(
                scores, [&](int n) -> Vector<Raw<T>> { return {tile.keys[8 * n + g], {}}; });
        __syncthreads();
        keys.start(key_of, at + TOKENS, end);
        if (seen)
            rows.template weigh<TOKENS / 8>(scores, p, [&](int i, int half, int token) {
                const int last = position[i][half];
                return at + token <= last && at + token >= low_of(last);
            });
        values.land();
        __syncthreads();
        if (seen) {
#pragma unroll
            for (int n = 0; n < TOKENS / 16; n++) {
                Value<Raw<T>, D> value[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    value[i].load({tile.values[16 * n + 2 * t + i % 2 + i / 2 * 8], {}}, g);
                rows.accumulate(scores[2 * n], scores[2 * n + 1], value);
            }
        }
        __syncthreads();
        values.start(value_of, at + TOKENS, end);
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
                store_pair(out + value_dim<Raw<T>, D>(word, 2 * t + column),
                           rows.accumulator[i / 2][2 * word][2 * half + column] * factor,
                           rows.accumulator[i / 2][2 * word + 1][2 * half + column] * factor);
    }
}
