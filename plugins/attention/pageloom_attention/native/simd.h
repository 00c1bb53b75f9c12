// Vectors of float32, and how the elements of q, k and v are read and written as such.
//
// A vector is the type of GCC and Clang that stands for one register of the CPU that the code is
// compiled for, or for plain scalar code where it has none, so all that is not named below by an
// intrinsic compiles anywhere.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#include <arm_neon.h>
#endif

namespace pageloom {

// LANES is the number of float32 in a register. A tile of the product in product.h is ROWS by
// COLUMNS registers, chosen to fit into the register file with what is multiplied.
#if defined(__AVX512F__)
constexpr int LANES = 16, ROWS = 6, COLUMNS = 4;  // 32 registers
#elif defined(__AVX__)
constexpr int LANES = 8, ROWS = 6, COLUMNS = 2;  // 16 registers
#elif defined(__aarch64__)
constexpr int LANES = 4, ROWS = 6, COLUMNS = 4;  // 32 registers
#else
constexpr int LANES = 4, ROWS = 3, COLUMNS = 4;  // 16 registers
#endif

constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();
constexpr float LOG2_E = 1.44269504f;

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(LANES * sizeof(T))));
};
using Vector = VectorOf<float>::type;
using Words = VectorOf<uint32_t>::type;
using Halves = VectorOf<uint16_t>::type;
using Bytes = VectorOf<uint8_t>::type;

struct bfloat16 {
  uint16_t bits;
};
struct float16 {
  uint16_t bits;
};

template <typename To, typename From>
inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// All lanes the same.
inline Vector spread(float x) { return x - Vector{}; }

inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

inline float largest(Vector x) {
  float result = x[0];
  for (int i = 1; i < LANES; ++i) result = x[i] > result ? x[i] : result;
  return result;
}

inline float sum(Vector x) {
  float parts[LANES];
  std::memcpy(parts, &x, sizeof x);
  for (int half = LANES / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) parts[i] += parts[i + half];
  return parts[0];
}

inline Vector load(const float* x) {
  Vector result;
  std::memcpy(&result, x, sizeof result);
  return result;
}

inline Vector load(const bfloat16* x) {
  Halves bits;
  std::memcpy(&bits, x, sizeof bits);
  return bit_cast<Vector>(__builtin_convertvector(bits, Words) << 16);
}

// Exponent and mantissa move to their place in a float32, whose exponent has another bias, which a
// product corrects, for subnormals too. Infinity and NaN have the largest exponent in both.
inline Vector widen_float16(Halves x) {
#if defined(__AVX512F__)
  return bit_cast<Vector>(_mm512_cvtph_ps(bit_cast<__m256i>(x)));
#elif defined(__F16C__) && defined(__AVX__)
  return bit_cast<Vector>(_mm256_cvtph_ps(bit_cast<__m128i>(x)));
#else
  Words bits = __builtin_convertvector(x, Words);
  Words magnitude = (bits & 0x7fff) << 13;
  Vector scaled = bit_cast<Vector>(magnitude) * 0x1p112f;
  Words result = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : bit_cast<Words>(scaled);
  return bit_cast<Vector>(result | (bits & 0x8000) << 16);
#endif
}

inline Vector load(const float16* x) {
  Halves bits;
  std::memcpy(&bits, x, sizeof bits);
  return widen_float16(bits);
}

inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

inline void store_low_halves(uint16_t* to, Words x) {
  Halves narrow = __builtin_convertvector(x, Halves);
  std::memcpy(to, &narrow, sizeof narrow);
}

// The bits of a bfloat16 in each lane. Rounds to nearest even. NaN stays NaN.
inline Words to_bfloat16(Vector x) {
  Words bits = bit_cast<Words>(x);
  Words rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  return (bits & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded;
}

inline void store(bfloat16* to, Vector x) {
#if defined(__AVX512BF16__)
  auto narrow = _mm512_cvtneps_pbh(bit_cast<__m512>(x));
  std::memcpy(to, &narrow, sizeof narrow);
#else
  store_low_halves(&to->bits, to_bfloat16(x));
#endif
}

// Rounds to nearest even; what is too large becomes infinity. NaN stays NaN.
inline void store(float16* to, Vector x) {
  Words bits = bit_cast<Words>(x), magnitude = bits & 0x7fffffff;
  // Adding a power of two leaves the bits of a subnormal result at the low end of the mantissa.
  Words tiny = bit_cast<Words>(bit_cast<Vector>(magnitude) + 0.5f) - 0x3f000000;
  Words normal = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
  Words result = magnitude < 0x38800000 ? tiny : normal;
  result = magnitude >= 0x477ff000 ? Words{} + 0x7c00 : result;
  result = magnitude > 0x7f800000 ? Words{} + 0x7e00 : result;
  store_low_halves(&to->bits, result | (bits >> 16 & 0x8000));
}

// The first `count` elements; the other lanes are 0.
template <typename T>
inline Vector load_part(const T* x, int64_t count) {
  if (count >= LANES) return load(x);
  T padded[LANES] = {};
  if (count > 0) std::memcpy(padded, x, count * sizeof(T));
  return load(padded);
}

// The first `count` lanes.
template <typename T>
inline void store_part(T* to, Vector x, int64_t count) {
  if (count >= LANES) return store(to, x);
  T padded[LANES];
  store(padded, x);
  if (count > 0) std::memcpy(to, padded, count * sizeof(T));
}

// 2^x for x <= 127, within 2 units in the last place; 0 for x < -126.
inline Vector power_of_two(Vector x) {
  // Adding 1.5 * 2^23 rounds to an integer, which the low bits then hold.
  Vector shifted = x + 0x1.8p23f;
  Vector r = x - (shifted - 0x1.8p23f);
  // Minimax polynomial on [-0.5, 0.5], relative error 7.5e-8.
  Vector p = 1.32765e-3f * r + 9.67554e-3f;
  p = p * r + 5.550713e-2f;
  p = p * r + 2.402212e-1f;
  p = p * r + 6.9314697e-1f;
  p = p * r + 1.00000007f;
  Words bits = bit_cast<Words>(p) + (bit_cast<Words>(shifted) << 23);
  return x < -126.0f ? Vector{} : bit_cast<Vector>(bits);
}

// |x| may be anything; the absolute error is below 1e-6.
inline Vector tanh(Vector x) {
  Vector clamped = x > 10.0f ? spread(10.0f) : x < -10.0f ? spread(-10.0f) : x;
  return 1.0f - 2.0f / (power_of_two(clamped * (2 * LOG2_E)) + 1.0f);
}

}  // namespace pageloom
