// Storing new keys and values, and copying blocks.
#pragma once
#include <device.cuh>
#include <params.cuh>

// One thread per 16 bytes; grid (ceil(num_tokens * 2 * num_kv_heads * vectors / THREADS)).
template <typename T, int D, int BS>
__global__ void __launch_bounds__(THREADS) store(const StoreParams p) {
    constexpr int VECTOR = 16 / sizeof(T), VECTORS = D / VECTOR;
    const unsigned index = blockIdx.x * THREADS + threadIdx.x, vector = index % VECTORS;
    const unsigned head = index / VECTORS % p.num_kv_heads;
    const unsigned rest = index / VECTORS / p.num_kv_heads, value = rest % 2, token = rest / 2;
    if (token >= p.num_tokens) return;
    const T* source = value ? (const T*)p.v + token * p.v_stride : (const T*)p.k + token * p.k_stride;
    const long long slot = p.slots[token], block = slot / BS;
    const long long row = ((block * 2 + value) * p.num_kv_heads + head) * BS + slot % BS;
    ((uint4*)p.cache)[row * VECTORS + vector] = ((const uint4*)(source + head * D))[vector];
}

// Grid (thread blocks per copy, copies).
__global__ void __launch_bounds__(THREADS) copy(const CopyParams p) {
    const uint4* source = (const uint4*)p.cache + p.pairs[2 * blockIdx.y] * p.block_words;
    uint4* target = (uint4*)p.cache + p.pairs[2 * blockIdx.y + 1] * p.block_words;
    const long long step = (long long)gridDim.x * THREADS;
    for (long long i = (long long)blockIdx.x * THREADS + threadIdx.x; i < p.block_words; i += step)
        target[i] = source[i];
}
