// What the host passes to the kernels, and how work is laid out. The structures have the layout of
// their namesakes in params.py.
#pragma once
#include <codes.cuh>

struct AttentionParams {
    const void* q;            // [tokens, num_heads, D], rows q_stride apart
    void* out;                // like q, rows out_stride apart
    const void* cache;        // [num_blocks, 2, num_kv_heads, BS] vectors: K, then V
    const unsigned* scales;   // that each vector carries, in the same order
    const int* block_tables;  // rows table_stride apart
    const int* seq_lens;
    const int* query_start;
    const int* work;     // prefill: (sequence, first row) of each thread block
    const float* sinks;  // [num_heads], or null
    float* partials;     // [sequences, num_heads, splits, D + 2]: accumulator, maximum, sum
    long long q_stride, out_stride, table_stride;  // elements
    int num_kv_heads;
    int window;            // 0: none
    int splits;            // parts that the context of a decode may have
    int min_split_tokens;  // of a part, unless the context is shorter
    float scale;        // times that of a static format's K
    float value_scale;  // of a static format's V, else 1
    float softcap;      // 0: none
};

struct StoreParams {
    const void* k;  // [num_tokens, num_kv_heads, D], rows k_stride apart
    const void* v;
    void* cache;
    unsigned* scales;
    const long long* slots;
    long long k_stride, v_stride;  // elements
    unsigned num_tokens, num_kv_heads;
    float key_inverse, value_inverse;  // of a static format's scales
    float most;                        // what vectors with their own scales are limited to
};

struct CopyParams {
    void* cache;
    const int* pairs;       // (source, target)
    long long block_words;
};

constexpr int WARP = 32;
constexpr int WARPS = 4;
constexpr int THREADS = WARP * WARPS;  // of every kernel
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr float LOG2E = 1.4426950408889634f;

constexpr __host__ __device__ int ceil_div(int a, int b) {
    return (a + b - 1) / b;
}

constexpr __host__ __device__ int power_of_two_from(int n) {
    int power = 1;
    while (power < n) power *= 2;
    return power;
}

// One KV head of one sequence in the cache, whose blocks hold BS tokens.
template <typename K, int D, int BS>
struct Context {
    static constexpr int BYTES = D * K::BITS / 8;  // of a vector

    const char* cache;
    const unsigned* scales;
    const int* table;
    long long first;   // vector of this head in block 0
    long long values;  // vectors from a key to its value

    __device__ Context(const AttentionParams& p, int sequence, int kv_head)
        : cache((const char*)p.cache),
          scales(p.scales),
          table(p.block_tables + sequence * p.table_stride),
          first((long long)kv_head * BS),
          values((long long)p.num_kv_heads * BS) {}

    __device__ int block(int position) const {
        return table[position / BS];
    }

    __device__ Vector<K> key(int block, int position) const {
        return vector(first + block * 2 * values + position % BS);
    }

    __device__ Vector<K> value(int block, int position) const {
        return vector(first + (block * 2 + 1) * values + position % BS);
    }

    __device__ Vector<K> vector(long long index) const {
        return {cache + index * BYTES, K::scale_at(scales, index)};
    }
};

// The part of a context that one thread block attends to, for a query at its end.
struct Split {
    int begin, end;  // tokens; empty if the context has fewer parts
    int used;        // parts of this context
};

// Each context is cut by its own length, so the grid depends on the batch size alone, and a
// captured CUDA graph stays right as contexts grow.
__device__ inline Split split_of(const AttentionParams& p, int length, int splits, int index) {
    const int low = p.window && p.window < length ? length - p.window : 0;
    const int tokens = max(p.min_split_tokens, ceil_div(length - low, splits));
    const int begin = low + index * tokens;
    return {begin, min(begin + tokens, length), ceil_div(length - low, tokens)};
}

// A score under softcap in units of log2, so that exp2 does for exp.
__device__ inline float capped(const AttentionParams& p, float product) {
    const float x = product * p.scale / p.softcap;
    // This tanh is right to 1e-7 of the cap, and a fifth of the code of tanhf.
    return p.softcap * LOG2E * (1.0f - __fdividef(2.0f, exp2_fast(2.0f * LOG2E * x) + 1.0f));
}

__device__ inline float logit(const AttentionParams& p, float product) {
    return p.softcap == 0.0f ? product * p.scale * LOG2E : capped(p, product);
}

// What an accumulator of weights 2^(score - maximum) is multiplied by at the end.
__device__ inline float normalizer(const AttentionParams& p, int head, float maximum, float sum) {
    if (!p.sinks) return p.value_scale / sum;
    const float sink = p.sinks[head] * LOG2E, top = fmaxf(maximum, sink);
    const float weight = exp2_fast(maximum - top);
    return p.value_scale * weight / (sum * weight + exp2_fast(sink - top));
}

// 2^(x - maximum), where both may be minus infinity.
__device__ inline float weight_of(float x, float maximum) {
    return exp2_fast(x - (maximum == negative_infinity() ? 0.0f : maximum));
}

template <typename T>
__device__ void store_pair(T* at, float first, float second) {
    *(unsigned*)at = pack<T>(first, second);
}

template <>
__device__ inline void store_pair<float>(float* at, float first, float second) {
    at[0] = first;
    at[1] = second;
}
