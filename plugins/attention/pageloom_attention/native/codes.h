// Elements of coded vectors, as `VectorLayout` of pageloom.contract defines them: from float32 to
// codes and back, LANES or 16 at a time.
//
// Codes must not depend on the CPU or the compiler. So nothing is added to a product before the
// comparison that limits it, lest the two become one operation with one rounding; and comparisons
// pass NaN on, which instructions for minima may drop.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace pageloom {

inline Vector nan_vector() { return spread(std::numeric_limits<float>::quiet_NaN()); }

// NaN stays NaN.
inline Vector limited(Vector x, float least, float most) {
  return x > most ? spread(most) : x < least ? spread(least) : x;
}

inline Vector absolute(Vector x) { return bit_cast<Vector>(bit_cast<Words>(x) & 0x7fffffff); }

// In two steps, without which GCC converts each lane alone.
inline void store_low_bytes(uint8_t* to, Words x) {
  Bytes narrow = __builtin_convertvector(__builtin_convertvector(x, Halves), Bytes);
  std::memcpy(to, &narrow, sizeof narrow);
}

inline Halves load_halves(const uint8_t* bytes) {
#if defined(__AVX512BW__)
  return bit_cast<Halves>(
      _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes))));
#else
  Bytes narrow;
  std::memcpy(&narrow, bytes, sizeof narrow);
  return __builtin_convertvector(narrow, Halves);
#endif
}

inline Vector load_integers(const uint8_t* bytes) {
#if defined(__AVX512F__)
  return bit_cast<Vector>(_mm512_cvtepi32_ps(
      _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)))));
#elif defined(__AVX2__) && defined(__F16C__)
  return bit_cast<Vector>(_mm256_cvtepi32_ps(
      _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)))));
#else
  using Integers = VectorOf<int32_t>::type;
  return __builtin_convertvector(__builtin_convertvector(load_halves(bytes), Integers), Vector);
#endif
}

// To the nearest integer, ties to even, for |x| <= 2^22; its two's complement is in the low bits.
inline Words to_integer(Vector x) { return bit_cast<Words>(x + 0x1.8p23f); }
inline Vector rounded(Vector x) { return x + 0x1.8p23f - 0x1.8p23f; }

// Where the error of a code depends on the scale, a vector's own is the best of FITS in an octave.
constexpr int FITS = 16;
constexpr float POWERS[FITS] = {  // 2^(i / FITS)
    1.0f, 1.04427373f, 1.09050775f, 1.13878858f, 1.18920708f, 1.24185777f, 1.29683959f, 1.35425556f,
    1.41421354f, 1.47682619f, 1.54221082f, 1.61049032f, 1.68179286f, 1.75625217f, 1.8340081f, 1.91520655f};

// An element type says how many codes share a byte, which byte stands for zeros, its largest finite
// number, and whether scales are fitted. `decode` reads LANES codes of a byte each; `encode`
// writes them, from numbers that are not limited yet.

// A sign, 7 - MANTISSA bits of exponent, MANTISSA bits; NaN is 0x7f, either sign.
template <int MANTISSA>
struct Float8 {
  static constexpr int PER_BYTE = 1;
  static constexpr uint8_t ZERO = 0;
  static constexpr bool IS_AFFINE = false;
  static constexpr bool IS_FITTED = true;
  static constexpr float LIMIT = MANTISSA == 3 ? 448.0f : 57344.0f;
  static constexpr float UNIT = MANTISSA == 3 ? 0.125f : 32.0f;  // 256 between the largest codes

  // How far x * UNIT is from the nearest code, in UNITs, for x >= 0; subnormal codes aside.
  static Vector error(Vector x) {
    constexpr uint32_t HALF = 1 << (22 - MANTISSA);
    const uint32_t most = bit_cast<uint32_t>(LIMIT / UNIT);
    Words bits = bit_cast<Words>(x);
    bits = bits > most ? Words{} + most : bits;
    return bit_cast<Vector>((bits + HALF) & -2 * HALF) - bit_cast<Vector>(bits);
  }

  // As a float16, whose exponent has another bias where it is not 5 bits wide too.
  static Vector decode(const uint8_t* codes) {
    Halves bits = load_halves(codes);
    if constexpr (MANTISSA == 2) return widen_float16(bits << 8);
    Halves magnitude = bits & 0x7f;
    Halves result = magnitude << 7 | (bits & 0x80) << 8;
    return widen_float16(magnitude == 0x7f ? Halves{} + 0x7e00 : result) * 256.0f;
  }

  static void encode(uint8_t* to, Vector x) {
    constexpr int SHIFT = 23 - MANTISSA, BIAS = MANTISSA == 3 ? 7 : 15;
    constexpr uint32_t LEAST_NORMAL = (128 - BIAS) << 23;
    // In whose last place the code's bits are those of a subnormal.
    constexpr uint32_t MAGIC = (128 - BIAS + SHIFT) << 23;
    const Words bits = bit_cast<Words>(x);
    Words magnitude = bits & 0x7fffffff;
    const auto is_nan = magnitude > 0x7f800000;
    const uint32_t most = bit_cast<uint32_t>(LIMIT);
    magnitude = magnitude > most ? Words{} + most : magnitude;
    Words tiny = bit_cast<Words>(bit_cast<Vector>(magnitude) + bit_cast<float>(MAGIC)) - MAGIC;
    Words normal = magnitude - (127 - BIAS << 23) + ((1 << (SHIFT - 1)) - 1);
    normal = (normal + (magnitude >> SHIFT & 1)) >> SHIFT;
    Words result = magnitude < LEAST_NORMAL ? tiny : normal;
    result = is_nan ? Words{} + 0x7f : result;
    store_low_bytes(to, result | (bits >> 24 & 0x80));
  }
};

// -127 to 127; -128 is NaN.
struct Int8 {
  static constexpr int PER_BYTE = 1;
  static constexpr uint8_t ZERO = 0;
  static constexpr bool IS_AFFINE = false;
  static constexpr bool IS_FITTED = false;
  static constexpr float LIMIT = 127;

  static Vector decode(const uint8_t* codes) {
    Vector x = load_integers(codes);  // those below 0 are 256 too large
    x = x >= 128.0f ? x - 256.0f : x;
    return x == -128.0f ? nan_vector() : x;
  }
  static void encode(uint8_t* to, Vector x) {
    Words codes = to_integer(limited(x, -LIMIT, LIMIT));
    store_low_bytes(to, x != x ? Words{} + 0x80 : codes);
  }
};

// Two in a byte. Kernels unpack them to a byte each first.
struct Nibbles {
  static constexpr int PER_BYTE = 2;

  static Vector decode(const uint8_t* codes) {
    return load_integers(codes);
  }
};

// -7 to 7, stored as 1 to 15; 0 is NaN.
struct Int4 : Nibbles {
  static constexpr uint8_t ZERO = 0x88;
  static constexpr bool IS_AFFINE = false;
  static constexpr bool IS_FITTED = false;
  static constexpr float LIMIT = 7;

  static Vector decode(const uint8_t* codes) {
    Vector x = Nibbles::decode(codes);
    return x == 0.0f ? nan_vector() : x - 8.0f;
  }
  static void encode(uint8_t* to, Vector x) {
    Words codes = to_integer(limited(x, -LIMIT, LIMIT)) + 8;
    store_low_bytes(to, x != x ? Words{} : codes & 15);
  }
};

// 0 to 15, from the vector's least element on.
struct AffineInt4 : Nibbles {
  static constexpr uint8_t ZERO = 0;
  static constexpr bool IS_AFFINE = true;
  static constexpr float LIMIT = 15;

  static void encode(uint8_t* to, Vector x) {
    Words codes = to_integer(limited(x, 0, LIMIT));
    store_low_bytes(to, x != x ? Words{} : codes & 15);
  }
};

}  // namespace pageloom
