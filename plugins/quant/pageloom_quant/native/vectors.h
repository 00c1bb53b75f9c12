// Vectors of float32 and the element formats of activations and scales.
//
// A vector is the type of GCC and Clang that stands for one register of the CPU that the code is
// compiled for, or for plain scalar code where it has none.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace pageloom {

#if defined(__AVX512F__)
constexpr int LANES = 16;  // float32 in a register
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

template <typename T>
struct VectorOf {
  typedef T type __attribute__((vector_size(LANES * sizeof(T))));
};
using Vector = VectorOf<float>::type;
using Words = VectorOf<uint32_t>::type;
using Integers = VectorOf<int32_t>::type;

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

template <typename V, typename T>
inline V load_as(const T* x) {
  V result;
  std::memcpy(&result, x, sizeof result);
  return result;
}

inline Words load_halves(const uint16_t* x) {
  return __builtin_convertvector(load_as<VectorOf<uint16_t>::type>(x), Words);
}

inline Vector load(const float* x) { return load_as<Vector>(x); }

inline Vector load(const bfloat16* x) { return bit_cast<Vector>(load_halves(&x->bits) << 16); }

// The exponent gets its place by a shift and its bias by a product, which is right for subnormals
// too. Infinity and NaN have the largest exponent in both formats.
inline Vector load(const float16* x) {
#if defined(__AVX512F__)
  return bit_cast<Vector>(_mm512_cvtph_ps(load_as<__m256i>(x)));
#elif defined(__F16C__) && defined(__AVX__)
  return bit_cast<Vector>(_mm256_cvtph_ps(load_as<__m128i>(x)));
#else
  Words half = load_halves(&x->bits), magnitude = (half & 0x7fff) << 13;
  Words finite = bit_cast<Words>(bit_cast<Vector>(magnitude) * 0x1p112f);
  Words result = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite;
  return bit_cast<Vector>(result | (half & 0x8000) << 16);
#endif
}

inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }

inline void store_halves(uint16_t* to, Words x) {
  auto narrow = __builtin_convertvector(x, VectorOf<uint16_t>::type);
  std::memcpy(to, &narrow, sizeof narrow);
}

// Rounds to nearest even. NaN stays NaN.
inline void store(bfloat16* to, Vector x) {
  Words bits = bit_cast<Words>(x), rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  store_halves(&to->bits, (bits & 0x7fffffff) > 0x7f800000 ? Words{} + 0x7fc0 : rounded);
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
  store_halves(&to->bits, result | (bits >> 16 & 0x8000));
}

// The first `count` elements, at most all lanes; the other lanes are 0.
template <typename T>
inline Vector load_part(const T* x, int64_t count) {
  if (count >= LANES) return load(x);
  T padded[LANES] = {};
  std::memcpy(padded, x, count * sizeof(T));
  return load(padded);
}

// The first `count` lanes, at most all.
template <typename T>
inline void store_part(T* to, Vector x, int64_t count) {
  if (count >= LANES) return store(to, x);
  T padded[LANES];
  store(padded, x);
  std::memcpy(to, padded, count * sizeof(T));
}

}  // namespace pageloom
