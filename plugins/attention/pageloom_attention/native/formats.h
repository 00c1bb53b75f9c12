// The element formats that the kernels compute with.

#pragma once

#include <cstdint>
#include <cstring>
#include <limits>

#include "simd.h"

namespace pageloom {

constexpr int64_t NEVER = std::numeric_limits<int64_t>::max();

// A format says how the cache holds elements (Stored), and in which form the queries and softmax
// weights that multiply them are kept (Operand). PAIR elements that are neighbours along the axis
// of summation lie side by side, for instructions that sum such pairs. `multiply_add` adds to each
// lane of `sum` the products of that lane's PAIR elements with the PAIR of `operand`. `widen` turns
// [n / PAIR, m, PAIR] elements into float32 [n, m], which takes less time than it saves where they
// are used in WIDE_ROWS rows or more. `store_rows` puts elements [row, column ...] and [row + 1,
// column ...], for an even row, into [n / PAIR, m, PAIR].

// One element per lane, widened to float32.
template <typename T>
struct Single {
  using Stored = T;
  using Operand = float;
  using Loaded = Vector;
  using Factor = Vector;
  static constexpr int PAIR = 1;
  static constexpr int64_t WIDE_ROWS = sizeof(T) < sizeof(float) ? 4 * ROWS : NEVER;
  static Loaded load_stored(const T* stored) { return load(stored); }
  static Factor spread_operand(const float* operand) { return spread(*operand); }
  static Vector multiply_add(Vector sum, Loaded stored, Factor operand) {
    return sum + stored * operand;
  }
  static void widen(const Stored* from, float* to, int64_t n, int64_t m) {
    for (int64_t i = 0; i < n * m; i += LANES) store(to + i, load(from + i));
  }
  static void store_rows(T* to, int64_t row, int64_t m, int64_t column, Vector even, Vector odd) {
    store(to + row * m + column, even);
    store(to + (row + 1) * m + column, odd);
  }
};

// Pairs of bfloat16, which AVX-512 and NEON can multiply and sum in one instruction.
struct BFloat16Pairs {
  using Stored = bfloat16;
  using Operand = bfloat16;
  static constexpr int PAIR = 2;
#if defined(__AVX512FP16__)
  // Intel's cores since Sapphire Rapids: an instruction for pairs takes twice as long as one for
  // float32 (measured: 87 and 102 GFLOP/s).
  static constexpr int64_t WIDE_ROWS = 4 * ROWS;
#else
  static constexpr int64_t WIDE_ROWS = NEVER;
#endif
  static void widen(const Stored* from, float* to, int64_t n, int64_t m) {
    for (int64_t row = 0; row < n; row += 2)
      for (int64_t i = 0; i < m; i += LANES) {
        Words pairs;
        std::memcpy(&pairs, from + row * m + 2 * i, sizeof pairs);
        store(to + row * m + i, bit_cast<Vector>(pairs << 16));
        store(to + (row + 1) * m + i, bit_cast<Vector>(pairs & 0xffff0000));
      }
  }
#if defined(__AVX512BF16__)
  static void store_rows(Stored* to, int64_t row, int64_t m, int64_t column, Vector even,
                         Vector odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9,
                                           24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1,
                                           16, 0);
    auto both = _mm512_cvtne2ps_pbh(bit_cast<__m512>(odd), bit_cast<__m512>(even));
    _mm512_storeu_si512(to + row * m + 2 * column,
                        _mm512_permutexvar_epi16(order, bit_cast<__m512i>(both)));
  }
  using Loaded = __m512i;
  using Factor = __m512i;
  static Loaded load_stored(const Stored* stored) { return _mm512_loadu_si512(stored); }
  static Factor spread_operand(const Operand* operand) {
    int32_t pair;
    std::memcpy(&pair, operand, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static Vector multiply_add(Vector sum, Loaded stored, Factor operand) {
    return bit_cast<Vector>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(stored),
                                             bit_cast<__m512bh>(operand)));
  }
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
  static void store_rows(Stored* to, int64_t row, int64_t m, int64_t column, Vector even,
                         Vector odd) {
    Words pairs = to_bfloat16(even) | to_bfloat16(odd) << 16;
    std::memcpy(to + row * m + 2 * column, &pairs, sizeof pairs);
  }
  using Loaded = bfloat16x8_t;
  using Factor = bfloat16x8_t;
  static Loaded load_stored(const Stored* stored) {
    return vld1q_bf16(reinterpret_cast<const bfloat16_t*>(stored));
  }
  static Factor spread_operand(const Operand* operand) {
    uint32_t pair;
    std::memcpy(&pair, operand, sizeof pair);
    return vreinterpretq_bf16_u32(vdupq_n_u32(pair));
  }
  static Vector multiply_add(Vector sum, Loaded stored, Factor operand) {
    return bit_cast<Vector>(vbfdotq_f32(bit_cast<float32x4_t>(sum), stored, operand));
  }
#endif
};

#if defined(__AVX512BF16__) || defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
using BFloat16 = BFloat16Pairs;
#else
using BFloat16 = Single<bfloat16>;
#endif

}  // namespace pageloom
