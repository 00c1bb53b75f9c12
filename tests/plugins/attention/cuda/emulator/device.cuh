// CUDA's language and built-in functions, and the kernels' own device.cuh, in terms of the emulator.
#pragma once
#include <algorithm>
#include <cmath>

#include "emulator.h"

#define __device__
#define __host__
#define __global__
#define __launch_bounds__(...)
#define threadIdx (emulator::block().thread_index)
#define blockIdx (emulator::block().block_index)
#define gridDim (emulator::block().grid_size)

using std::max;
using std::min;

struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};

#define __syncthreads emulator::sync_block

inline void check_mask(unsigned mask) {
    if (mask != 0xffffffffu) emulator::block().fail("only whole warps are emulated");
}

template <typename T>
T shuffle(const char* operation, unsigned mask, T value, unsigned source) {
    static_assert(sizeof(T) == 4);
    check_mask(mask);
    struct {
        T value;
        unsigned source;
    } operands{value, source};
    auto* out = emulator::meet(operation, &operands, sizeof operands, [](emulator::Warp& warp) {
        for (int i = 0; i < emulator::LANES; i++) warp.out[i][0] = warp.in[warp.in[i][1]][0];
    });
    memcpy(&value, out, 4);
    return value;
}

template <typename T>
T __shfl_sync(unsigned mask, T value, int source) {
    return shuffle("__shfl_sync", mask, value, source % emulator::LANES);
}

template <typename T>
T __shfl_xor_sync(unsigned mask, T value, int lanes) {
    return shuffle("__shfl_xor_sync", mask, value, (emulator::block().current % emulator::LANES) ^ lanes);
}

inline int __any_sync(unsigned mask, int predicate) {
    check_mask(mask);
    return emulator::meet("__any_sync", &predicate, 4, [](emulator::Warp& warp) {
        uint32_t any = 0;
        for (auto& in : warp.in) any |= in[0];
        for (auto& out : warp.out) out[0] = any != 0;
    })[0];
}

inline void __syncwarp() {
    const char nothing = 0;
    emulator::meet("__syncwarp", &nothing, 1, [](emulator::Warp&) {});
}

inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
    const uint64_t bytes = (uint64_t)y << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; i++)
        result |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 255) << 8 * i;
    return result;
}

inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}

inline float __frcp_rn(float x) {
    return 1.0f / x;
}

inline float __fdiv_rn(float x, float y) {
    return x / y;
}

inline float __fdividef(float x, float y) {
    return std::fabs(y) > 0x1p126f ? 0.0f : x / y;
}

// What follows stands for the kernels' device.cuh.

struct bf16 {
    unsigned short bits;
};
struct fp16 {
    unsigned short bits;
};

template <typename T>
T& shared_memory() {
    static_assert(sizeof(T) <= emulator::SHARED_BYTES, "a block has 48 KB of static shared memory");
    return *(T*)emulator::block().shared;
}

inline float negative_infinity() {
    return -INFINITY;
}

inline float exp2_fast(float x) {
    return exp2f(x);
}

inline float widen(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

inline float widen(fp16 x) {
    _Float16 value;
    memcpy(&value, &x.bits, 2);
    return value;
}

template <typename T>
T narrow(float x);

template <>
inline bf16 narrow<bf16>(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    if (x != x) return {0x7fff};
    return {(unsigned short)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};  // to nearest even
}

template <>
inline fp16 narrow<fp16>(float x) {
    const auto value = (_Float16)x;
    fp16 result;
    memcpy(&result.bits, &value, 2);
    return result;
}

template <typename T>
unsigned pack(float low, float high) {
    return narrow<T>(low).bits | (unsigned)narrow<T>(high).bits << 16;
}

template <typename T>
float2 unpack(unsigned word) {
    return {widen(T{(unsigned short)word}), widen(T{(unsigned short)(word >> 16)})};
}

// As the PTX ISA lays the fragments of mma.m16n8k16 out: lane 4g + t holds a[r] at row g + 8 (r %
// 2), columns 2t and 2t + 1, plus 8 if r >= 2; b[r] at rows 2t and 2t + 1, plus 8 if r = 1, and
// column g; c[r] at row g + 8 (r / 2), column 2t + r % 2.
template <typename T>
void multiply(emulator::Warp& warp) {
    float a[16][16], b[16][8], c[16][8];
    const auto half = [](uint32_t word, int i) { return widen(T{(unsigned short)(word >> 16 * i)}); };
    for (int lane = 0; lane < emulator::LANES; lane++) {
        const int g = lane / 4, t = lane % 4;
        const auto* in = warp.in[lane];
        memcpy(&c[g][2 * t], in, 8);
        memcpy(&c[g + 8][2 * t], in + 2, 8);
        for (int i = 0; i < 2; i++) {
            for (int r = 0; r < 4; r++) a[g + r % 2 * 8][2 * t + r / 2 * 8 + i] = half(in[4 + r], i);
            for (int r = 0; r < 2; r++) b[2 * t + r * 8 + i][g] = half(in[8 + r], i);
        }
    }
    for (int row = 0; row < 16; row++)
        for (int k = 0; k < 16; k++)
            for (int column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
    for (int lane = 0; lane < emulator::LANES; lane++) {
        const int g = lane / 4, t = lane % 4;
        memcpy(warp.out[lane], &c[g][2 * t], 8);
        memcpy(warp.out[lane] + 2, &c[g + 8][2 * t], 8);
    }
}

template <typename T>
void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    struct {
        float c[4];
        unsigned a[4], b[2];
    } operands{{c[0], c[1], c[2], c[3]}, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    memcpy(c, emulator::meet("mma", &operands, sizeof operands, multiply<T>), sizeof c);
}

inline void land(void* shared, const void* global) {
    if (global)
        memcpy(shared, global, 16);
    else
        memset(shared, 0, 16);
}

inline void copy_start(void* shared, const void* global, bool valid) {
    auto& b = emulator::block();
    auto& groups = b.thread().groups;
    if (((uintptr_t)shared | (uintptr_t)global) % 16) b.fail("a copy is not aligned to 16 bytes");
    if (groups.empty()) groups.emplace_back();
    if (!valid) global = nullptr;
    // It may land at any time until it is waited for: here, at either end.
    if (b.draw() % 2)
        land(shared, global);
    else
        groups.back().push_back({shared, global});
}

inline void copy_commit() {
    auto& groups = emulator::block().thread().groups;
    if (groups.empty()) groups.emplace_back();
    groups.emplace_back();
}

template <int PENDING>
void copy_wait() {
    auto& groups = emulator::block().thread().groups;
    while (groups.size() > PENDING + 1) {
        for (const auto& copy : groups.front()) land(copy.target, copy.source);
        groups.erase(groups.begin());
    }
}
