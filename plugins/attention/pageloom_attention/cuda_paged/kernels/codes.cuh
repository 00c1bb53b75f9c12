// How vectors are stored: as they are (`Raw`), or as codes, which `pageloom.contract.VectorLayout`
// defines (`Static`, `TokenHead`).
#pragma once
#include <device.cuh>

__device__ inline float not_a_number() {
    return __uint_as_float(0x7fffffff);
}

// `x` within the limits; fminf and fmaxf would lose that it is NaN.
__device__ inline float limited(float x, float low, float high) {
    return x != x ? x : fminf(fmaxf(x, low), high);
}

// 2^23 plus byte i of a word: its bits are those of a float.
constexpr float TWO_TO_23 = 8388608.0f;

__device__ inline float offset_byte(unsigned word, int i) {
    return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7540 | i));
}

// The bits of a small float with that many bits of mantissa, `x` being within its range. To the
// nearest, ties to even.
template <int MANTISSA, int BIAS>
__device__ unsigned float8(float x) {
    if (x != x) return 0x7f;
    const unsigned bits = __float_as_uint(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    const float absolute = __uint_as_float(magnitude);
    // Below the least normal number all are multiples of the least one.
    const float ones = __uint_as_float((126 + BIAS + MANTISSA) << 23);  // in 1.0
    if (magnitude < (128 - BIAS) << 23) return sign | (unsigned)rintf(absolute * ones);
    constexpr int DROPPED = 23 - MANTISSA;
    const unsigned rounded = magnitude + (1 << (DROPPED - 1)) - 1 + (magnitude >> DROPPED & 1);
    return sign | ((rounded >> DROPPED) - ((127 - BIAS) << MANTISSA));
}

// Where the error of a code depends on the scale, a vector's own is the best of FITS in an octave.
constexpr int FITS = 16;

// 2^(i / FITS)
__device__ constexpr float power(int i) {
    constexpr float POWERS[FITS] = {
        1.0f, 1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
        1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f, 1.91520655f};
    return POWERS[i];
}

// How far `x` is from the nearest small float, subnormal ones aside, in 256ths of `step`, by which
// the largest ones differ.
template <int MANTISSA>
__device__ float float8_error(float x, float step) {
    constexpr unsigned HALF = 1 << (22 - MANTISSA);
    const float code = __uint_as_float((__float_as_uint(x) + HALF) & -2 * HALF);
    return rintf((code - x) * (256.0f / step));
}

// An element type has
//   `pair(word, i)`: what the codes 2i and 2i + 1 of a word stand for, less the scale;
//   `checked(x)`: that number, NaN if its code means that;
//   `code(x)`: the code of a scaled number;
//   IS_FITTED: whether its errors depend on the scale; if so `error(x)`: that of a scaled number;
//   ZEROS: a word of codes of zero.
struct E4M3 {
    static constexpr int BITS = 8;
    static constexpr unsigned ZEROS = 0;
    static constexpr bool IS_FITTED = true;
    static constexpr float LIMIT = 448.0f;

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    __device__ static float2 pair(unsigned word, int i) {
        unsigned halves;
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((unsigned short)(word >> 16 * i)));
        return unpack<fp16>(halves);
    }

    __device__ static float checked(float x) {
        return x;
    }
#else
    __device__ static float2 pair(unsigned word, int i) {
        const unsigned bytes = __byte_perm(word, 0, i ? 0x3424 : 0x1404);  // high in their halves
        // As halves these are 2^-8 of what they should be, for the exponent's bias.
        const float2 x = unpack<fp16>((bytes & 0x80008000) | (bytes & 0x7f007f00) >> 1);
        return {x.x * 256.0f, x.y * 256.0f};
    }

    __device__ static float checked(float x) {
        return fabsf(x) > LIMIT ? not_a_number() : x;
    }
#endif

    __device__ static unsigned code(float x) {
        return float8<3, 7>(limited(x, -LIMIT, LIMIT));
    }

    __device__ static float error(float x) {
        return float8_error<3>(limited(x, -LIMIT, LIMIT), 32.0f);
    }
};

struct E5M2 {
    static constexpr int BITS = 8;
    static constexpr unsigned ZEROS = 0;
    static constexpr bool IS_FITTED = true;
    static constexpr float LIMIT = 57344.0f;

    __device__ static float2 pair(unsigned word, int i) {
        return unpack<fp16>(__byte_perm(word, 0, i ? 0x3424 : 0x1404));  // the high byte of a half
    }

    __device__ static float checked(float x) {
        return x;
    }

    __device__ static unsigned code(float x) {
        return float8<2, 15>(limited(x, -LIMIT, LIMIT));
    }

    __device__ static float error(float x) {
        return float8_error<2>(limited(x, -LIMIT, LIMIT), 8192.0f);
    }
};

struct Int8 {
    static constexpr int BITS = 8;
    static constexpr unsigned ZEROS = 0;
    static constexpr bool IS_FITTED = false;
    static constexpr float LIMIT = 127.0f;

    __device__ static float2 pair(unsigned word, int i) {
        const unsigned biased = word ^ 0x80808080;
        return {offset_byte(biased, 2 * i) - (TWO_TO_23 + 128.0f),
                offset_byte(biased, 2 * i + 1) - (TWO_TO_23 + 128.0f)};
    }

    __device__ static float checked(float x) {
        return x == -128.0f ? not_a_number() : x;
    }

    __device__ static unsigned code(float x) {
        return x != x ? 0x80 : (unsigned)(int)rintf(limited(x, -LIMIT, LIMIT)) & 0xff;
    }
};

// BIAS is what the stored number is larger by: 8 for codes of both signs.
template <int BIAS>
struct Nibble {
    static constexpr int BITS = 4;
    static constexpr unsigned ZEROS = 0x11111111u * BIAS;
    static constexpr bool IS_FITTED = false;

    __device__ static float2 pair(unsigned word, int i) {
        return {offset_byte(word & 0x0f0f0f0f, i) - (TWO_TO_23 + BIAS),
                offset_byte(word >> 4 & 0x0f0f0f0f, i) - (TWO_TO_23 + BIAS)};
    }

    __device__ static float checked(float x) {
        return x == -8.0f ? not_a_number() : x;
    }

    __device__ static unsigned code(float x) {
        if (x != x) return 0;
        constexpr float LOW = BIAS ? -7.0f : 0.0f, HIGH = BIAS ? 7.0f : 15.0f;
        return (unsigned)((int)rintf(limited(x, LOW, HIGH)) + BIAS);
    }
};

using Int4 = Nibble<8>;

// A format has BITS per element, `pair(word, i, scale)`: elements 2i and 2i + 1 of a word of codes,
// and `scale_at(scales, vector)`: the `Scale` that a vector carries.
struct NoScale {};

template <typename T>
struct Raw {
    static constexpr int BITS = 8 * sizeof(T);
    static constexpr unsigned ZEROS = 0;
    static constexpr bool CODED = false, SCALED = false;
    using Scale = NoScale;

    __device__ static Scale scale_at(const unsigned*, long long) {
        return {};
    }
};

// Its scale is left to whoever uses the elements: a constant moves out of sums.
template <typename E>
struct Static {
    static constexpr int BITS = E::BITS;
    static constexpr unsigned ZEROS = E::ZEROS;
    static constexpr bool CODED = true, SCALED = false;
    using Element = E;
    using Scale = NoScale;

    __device__ static Scale scale_at(const unsigned*, long long) {
        return {};
    }

    __device__ static float2 pair(unsigned word, int i, Scale) {
        const float2 x = E::pair(word, i);
        return {E::checked(x.x), E::checked(x.y)};
    }
};

// NaN codes need no check: a vector that has one has NaN for its scale.
template <typename E>
struct TokenHead {
    static constexpr int BITS = E::BITS;
    static constexpr unsigned ZEROS = E::ZEROS;
    static constexpr bool CODED = true, SCALED = true;
    using Element = E;
    struct Scale {
        float step;
    };

    __device__ static Scale scale_at(const unsigned* scales, long long vector) {
        return {__uint_as_float(scales[vector])};
    }

    __device__ static float2 pair(unsigned word, int i, Scale scale) {
        const float2 x = E::pair(word, i);
        return {x.x * scale.step, x.y * scale.step};
    }
};

template <>
struct TokenHead<Int4> {
    static constexpr int BITS = 4;
    static constexpr unsigned ZEROS = 0;
    static constexpr bool CODED = true, SCALED = true;
    using Element = Nibble<0>;
    struct Scale {
        float step, least;
    };

    __device__ static Scale scale_at(const unsigned* scales, long long vector) {
        const float2 both = unpack<fp16>(scales[vector]);
        return {both.x, both.y};
    }

    __device__ static float2 pair(unsigned word, int i, Scale scale) {
        const float2 x = Element::pair(word, i);
        return {fmaf(x.x, scale.step, scale.least), fmaf(x.y, scale.step, scale.least)};
    }
};

// Elements 2i and 2i + 1 of a word, in a word of two Ts.
template <typename T, typename K>
__device__ unsigned widened(unsigned word, int i, typename K::Scale scale) {
    if constexpr (K::CODED) {
        const float2 x = K::pair(word, i, scale);
        return pack<T>(x.x, x.y);
    } else {
        return word;
    }
}

// A vector in the cache; a null `at` where there is none.
template <typename K>
struct Vector {
    const char* at;
    typename K::Scale scale;
};

// Up to 128 bits, a power of two, in one load.
__device__ inline void load(unsigned* words, const char* at, int bits) {
    if (bits == 128) {
        const uint4 x = *(const uint4*)at;
        words[0] = x.x, words[1] = x.y, words[2] = x.z, words[3] = x.w;
    } else if (bits == 64) {
        const uint2 x = *(const uint2*)at;
        words[0] = x.x, words[1] = x.y;
    } else if (bits == 32) {
        words[0] = *(const unsigned*)at;
    } else if (bits == 16) {
        words[0] = *(const unsigned short*)at;
    } else {
        words[0] = *(const unsigned char*)at;
    }
}
