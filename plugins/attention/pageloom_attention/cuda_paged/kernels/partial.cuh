// Putting together what several warps, or several thread blocks, made of parts of a context.
#pragma once
#include <device.cuh>
#include <params.cuh>

// The rows of one query token, as the warps of a thread block add them up.
template <int ROWS, int D>
struct Sum {
    float maximum[WARPS][ROWS];
    float sum[WARPS][ROWS];
    float accumulator[ROWS][D];

    __device__ float top(int row) const {
        float best = maximum[0][row];
        for (int warp = 1; warp < WARPS; warp++) best = fmaxf(best, maximum[warp][row]);
        return best;
    }

    __device__ float total(int row, float top) const {
        float all = 0.0f;
        for (int warp = 0; warp < WARPS; warp++)
            all += sum[warp][row] * weight_of(maximum[warp][row], top);
        return all;
    }
};

template <int D>
__device__ float* partial_of(const AttentionParams& p, int sequence, int head, int num_heads,
                             int split) {
    const long long row = ((long long)sequence * num_heads + head) * p.splits + split;
    return p.partials + row * (D + 2);
}

// Write the first `rows` rows, which are `head` onward: to `out` (of the query token) if this
// part is the whole context, else to the partials. All threads of the block call this.
template <typename T, int ROWS, int D>
__device__ void write(const AttentionParams& p, const Sum<ROWS, D>& sum, int rows, T* out,
                      int sequence, int head, int num_heads, const Split& split, int index) {
    for (int i = threadIdx.x; i < rows * (D / 2); i += THREADS) {
        const int row = i / (D / 2), dim = i % (D / 2) * 2;
        const float top = sum.top(row), total = sum.total(row, top);
        const float first = sum.accumulator[row][dim], second = sum.accumulator[row][dim + 1];
        if (split.used == 1) {
            const float factor = normalizer(p, head + row, top, total);
            store_pair(out + (head + row) * D + dim, first * factor, second * factor);
            continue;
        }
        float* partial = partial_of<D>(p, sequence, head + row, num_heads, index);
        store_pair(partial + dim, first, second);
        if (dim == 0) store_pair(partial + D, top, total);
    }
}

// Merge the parts of each decode's context; grid (sequences, num_heads), D / 2 threads.
template <typename T, int D>
__global__ void merge(const AttentionParams p) {
    const int sequence = blockIdx.x, head = blockIdx.y, dim = threadIdx.x * 2;
    const int used = split_of(p, p.seq_lens[sequence], p.splits, 0).used;
    if (used <= 1) return;  // already in its place
    const float* partial = partial_of<D>(p, sequence, head, gridDim.y, 0);
    float top = negative_infinity();
    for (int i = 0; i < used; i++) top = fmaxf(top, partial[i * (D + 2) + D]);
    float first = 0.0f, second = 0.0f, total = 0.0f;
    for (int i = 0; i < used; i++, partial += D + 2) {
        const float weight = weight_of(partial[D], top);
        first += weight * partial[dim];
        second += weight * partial[dim + 1];
        total += weight * partial[D + 1];
    }
    const float factor = normalizer(p, head, top, total);
    T* out = (T*)p.out + sequence * p.out_stride + head * D;
    store_pair(out + dim, first * factor, second * factor);
}
