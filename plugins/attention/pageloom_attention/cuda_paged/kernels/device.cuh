// What the kernels need of the hardware beyond CUDA's built-in functions. NVRTC's own headers are
// not needed: the element types are bit patterns, and the instructions are given as PTX.
#pragma once

struct bf16 {
    unsigned short bits;
};

struct fp16 {
    unsigned short bits;
};

// Memory that the threads of a block share, not initialized. One type per kernel.
template <typename T>
__device__ T& shared_memory() {
    __shared__ T memory;
    return memory;
}

__device__ inline float negative_infinity() {
    return __int_as_float(0xff800000);
}

// 2^x within two units in the last place.
__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// Two elements in one word, `low` in the lower half, as they follow each other in memory.
template <typename T>
__device__ unsigned pack(float low, float high);

template <>
__device__ inline unsigned pack<bf16>(float low, float high) {
    unsigned word;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

template <>
__device__ inline unsigned pack<fp16>(float low, float high) {
    unsigned word;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
    return word;
}

// The two elements in a word.
template <typename T>
__device__ float2 unpack(unsigned word);

template <>
__device__ inline float2 unpack<bf16>(unsigned word) {
    return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000)};
}

template <>
__device__ inline float2 unpack<fp16>(unsigned word) {
    float2 x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x.x) : "h"((unsigned short)word));
    asm("cvt.f32.f16 %0, %1;" : "=f"(x.y) : "h"((unsigned short)(word >> 16)));
    return x;
}

// c += a @ b for a warp: a is 16 x 16, b is 16 x 8, c is 16 x 8. Lane 4 * g + t holds
//   a[0], a[1]: rows g, g + 8, columns 2t and 2t + 1;  a[2], a[3]: the same 8 columns on
//   b0: rows 2t and 2t + 1, column g;                  b1: the same 8 rows on
//   c[0], c[1]: row g, columns 2t and 2t + 1;          c[2], c[3]: row g + 8
// (PTX ISA, "Matrix fragments for mma.m16n8k16 with floating point type").
template <typename T>
__device__ void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

template <>
__device__ inline void mma<bf16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <>
__device__ inline void mma<fp16>(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Start to copy 16 bytes to shared memory; zeros if not `valid`, and then nothing is read. What
// was started since the last `copy_commit` becomes a group; `copy_wait<N>` waits until all but
// this thread's last N groups have arrived.
__device__ inline void copy_start(void* shared, const void* global, bool valid) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((unsigned)__cvta_generic_to_shared(shared)), "l"(global),
                   "r"(valid ? 16 : 0)
                 : "memory");
}

__device__ inline void copy_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int PENDING>
__device__ void copy_wait() {
    asm volatile("cp.async.wait_group %0;" : : "n"(PENDING) : "memory");
}
