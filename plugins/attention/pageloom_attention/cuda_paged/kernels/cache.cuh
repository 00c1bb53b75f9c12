// Storing new keys and values, and copying blocks.
#pragma once
#include <codes.cuh>
#include <device.cuh>
#include <params.cuh>

// A vector to be stored.
template <typename T>
struct Source {
    const T* at;
    long long row;  // vector of the cache
    bool value;

    // Vectors follow each other by token, K before V, and head.
    template <int D, int BS>
    __device__ static Source of(const StoreParams& p, unsigned vector) {
        const unsigned head = vector % p.num_kv_heads, rest = vector / p.num_kv_heads;
        const unsigned value = rest % 2, token = rest / 2;
        const long long slot = p.slots[token], block = slot / BS;
        const long long row = ((block * 2 + value) * p.num_kv_heads + head) * BS + slot % BS;
        const T* base =
            value ? (const T*)p.v + token * p.v_stride : (const T*)p.k + token * p.k_stride;
        return {base + head * D, row, value != 0};
    }
};

// One thread per 16 bytes.
template <typename T, int D, int BS>
__device__ void store_raw(const StoreParams& p, unsigned index) {
    constexpr unsigned VECTORS = D * sizeof(T) / 16;
    if (index / VECTORS >= 2 * p.num_tokens * p.num_kv_heads) return;
    const auto source = Source<T>::template of<D, BS>(p, index / VECTORS);
    ((uint4*)p.cache)[source.row * VECTORS + index % VECTORS] =
        ((const uint4*)source.at)[index % VECTORS];
}

template <typename T>
__device__ void read_eight(float (&x)[8], const T* at) {
#pragma unroll
    for (int i = 0; i < 8 * sizeof(T) / 16; i++) {
        unsigned words[4];
        load(words, (const char*)at + 16 * i, 128);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            if constexpr (sizeof(T) == 4) {
                x[4 * i + j] = __uint_as_float(words[j]);
            } else {
                const float2 pair = unpack<T>(words[j]);
                x[2 * j] = pair.x, x[2 * j + 1] = pair.y;
            }
        }
    }
}

// What makes codes of a vector: `code((x - least) * inverse)`.
struct Coding {
    float least, inverse;
    unsigned scale;  // as it is stored
};

__device__ inline Coding scaled_by(float scale) {
    return {0.0f, __frcp_rn(scale), __float_as_uint(scale)};
}

// The coding of a vector whose extreme elements are these. `broken` if one is NaN.
template <typename E>
__device__ Coding coding_of(E, float low, float high, bool broken) {
    // Whose inverse float32 still holds: 2^-100.
    const float most = fmaxf(fmaxf(-low, high), __uint_as_float(27u << 23));
    return scaled_by(broken ? not_a_number() : __fdiv_rn(most, E::LIMIT));
}

__device__ inline Coding coding_of(Nibble<0>, float low, float high, bool broken) {
    if (broken) return {0.0f, not_a_number(), 0x7fff7fff};
    const unsigned least = pack<fp16>(low, low) & 0xffff;
    const float base = unpack<fp16>(least).x;
    const float wanted = fmaxf(__fdiv_rn(high - base, 15.0f), __uint_as_float(103u << 23));  // 2^-24
    const unsigned step = pack<fp16>(wanted, wanted) & 0xffff;
    return {base, __frcp_rn(unpack<fp16>(step).x), step | least << 16};
}

// The scale whose codes come nearest to a vector of LANES lanes, `least` clipping none of them.
template <typename E, int LANES>
__device__ float fitted(const float (&x)[8], bool has_elements, float least) {
    float scale = least, best = __uint_as_float(0x7f800000);  // infinity
#pragma unroll
    for (int i = 0; i < FITS; i++) {
        const float candidate = least * power(i), inverse = __frcp_rn(candidate);
        float squares = 0.0f;  // of whole numbers, whose sum is the same in any order
#pragma unroll
        for (int k = 0; k < 8; k++) {
            const float error = has_elements ? E::error(x[k] * inverse) : 0.0f;
            squares += error * error;
        }
#pragma unroll
        for (int other = 1; other < LANES; other *= 2)
            squares += __shfl_xor_sync(ALL_LANES, squares, other);
        const float growth = power(2 * i % FITS) * (i < FITS / 2 ? 1.0f : 2.0f);  // squared
        const float error = squares * growth;
        if (error < best) best = error, scale = candidate;
    }
    return scale;
}

// A power of two of neighboring lanes per vector, each with eight of its elements.
template <typename T, typename K, int D, int BS>
__device__ void store_coded(const StoreParams& p, unsigned index) {
    using E = typename K::Element;
    constexpr int LANES = power_of_two_from(D / 8);
    const unsigned lane = index % LANES;
    const bool valid = index / LANES < 2 * p.num_tokens * p.num_kv_heads, has_elements = lane < D / 8;
    Source<T> source = {};
    float x[8] = {};
    if (valid) {
        source = Source<T>::template of<D, BS>(p, index / LANES);
        read_eight(x, source.at + (has_elements ? 8 * lane : 0));
    }
    Coding coding = {0.0f, source.value ? p.value_inverse : p.key_inverse, 0};
    if constexpr (K::SCALED) {
        float low = x[0], high = x[0];
        bool broken = false;
#pragma unroll
        for (int i = 0; i < 8; i++) {
            broken |= x[i] != x[i];
            x[i] = limited(x[i], -p.most, p.most);
            low = i ? fminf(low, x[i]) : x[i];
            high = i ? fmaxf(high, x[i]) : x[i];
        }
        unsigned any = broken;
#pragma unroll
        for (int other = 1; other < LANES; other *= 2) {
            low = fminf(low, __shfl_xor_sync(ALL_LANES, low, other));
            high = fmaxf(high, __shfl_xor_sync(ALL_LANES, high, other));
            any |= __shfl_xor_sync(ALL_LANES, any, other);
        }
        coding = coding_of(E(), low, high, any);
        if constexpr (E::IS_FITTED) {
            const float least = __uint_as_float(coding.scale);
            coding = scaled_by(fitted<E, LANES>(x, has_elements, least));
        }
        if (valid && lane == 0) p.scales[source.row] = coding.scale;
    }
    if (!valid || !has_elements) return;
    unsigned words[2] = {};
#pragma unroll
    for (int i = 0; i < 8; i++)
        words[i * E::BITS / 32] |= E::code((x[i] - coding.least) * coding.inverse)
                                   << i * E::BITS % 32;
    char* target = (char*)p.cache + source.row * (D * E::BITS / 8) + lane * E::BITS;
    if constexpr (E::BITS == 8)
        *(uint2*)target = uint2{words[0], words[1]};
    else
        *(unsigned*)target = words[0];
}

template <typename T, typename K, int D, int BS>
__global__ void __launch_bounds__(THREADS) store(const StoreParams p) {
    const unsigned index = blockIdx.x * THREADS + threadIdx.x;
    if constexpr (K::CODED)
        store_coded<T, K, D, BS>(p, index);
    else
        store_raw<T, D, BS>(p, index);
}

// Copy blocks in words of 8 or 16 bytes; grid (thread blocks per copy, copies).
template <typename WORD>
__global__ void __launch_bounds__(THREADS) copy(const CopyParams p) {
    const WORD* source = (const WORD*)p.cache + p.pairs[2 * blockIdx.y] * p.block_words;
    WORD* target = (WORD*)p.cache + p.pairs[2 * blockIdx.y + 1] * p.block_words;
    const long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < p.block_words; i += step)
        target[i] = source[i];
}
