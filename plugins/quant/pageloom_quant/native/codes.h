// From packed codes to numbers, and their products with activations.
//
// A word holds the codes of one output for 32 / BITS neighbours along the inputs, as signed numbers:
// those of even inputs in the low half, of odd ones in the high half, so that one shift brings a
// pair of neighbours to the same place in the two halves.

#pragma once

#include "vectors.h"

namespace pageloom {

constexpr int64_t STEP = 32;  // inputs that are summed before a scale is applied

template <int BITS>
constexpr int WORD_INPUTS = 32 / BITS;

template <int BITS>
constexpr int STEP_WORDS = STEP / WORD_INPUTS<BITS>;

// Code of input `k` of each word.
template <int BITS>
inline Vector code(Words words, int k) {
  const int place = k / 2 * BITS + k % 2 * 16;
  Integers top = bit_cast<Integers>(words << (32 - BITS - place));
  return __builtin_convertvector(top >> (32 - BITS), Vector);
}

// Activations are float32, one input at a time.
struct Plain {
  using Activation = float;
  static constexpr int INPUTS = 1;
  using Codes = Vector;
  template <int BITS>
  static Codes unpack(Words words, int i) {
    return code<BITS>(words, i);
  }
  static Vector multiply_add(Vector sum, Codes codes, const float* x) { return sum + codes * *x; }
};

#if defined(__AVX512BF16__) && defined(__AVX512BW__)
// Activations are bfloat16, two inputs at a time. Codes are integers of at most 8 bits, which
// bfloat16 holds exactly.
struct Pairs {
  using Activation = bfloat16;
  static constexpr int INPUTS = 2;
  using Codes = __m512i;

  template <int BITS>
  static Codes unpack(Words words, int i) {
    if constexpr (BITS == 4) {
      // The look-up takes the low 5 bits of each half; the fifth is of another code.
      const __m512i shifted = _mm512_srli_epi16(bit_cast<__m512i>(words), 4 * i);
      return _mm512_permutexvar_epi16(shifted, table());
    } else {
      const Words even = bit_cast<Words>(code<BITS>(words, 2 * i));
      const Words odd = bit_cast<Words>(code<BITS>(words, 2 * i + 1));
      return bit_cast<__m512i>(even >> 16 | odd);  // the low half of such float32 is 0
    }
  }

  static Vector multiply_add(Vector sum, Codes codes, const bfloat16* x) {
    int32_t pair;
    std::memcpy(&pair, x, sizeof pair);
    return bit_cast<Vector>(_mm512_dpbf16_ps(bit_cast<__m512>(sum), bit_cast<__m512bh>(codes),
                                             bit_cast<__m512bh>(_mm512_set1_epi32(pair))));
  }

 private:
  // 0 to 7, then -8 to -1, twice.
  static __m512i table() {
    const __m256i numbers = _mm256_setr_epi16(
        0, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0, short(0xc100), short(0xc0e0),
        short(0xc0c0), short(0xc0a0), short(0xc080), short(0xc040), short(0xc000), short(0xbf80));
    return _mm512_broadcast_i64x4(numbers);
  }
};
using ForBFloat16 = Pairs;
#else
using ForBFloat16 = Plain;
#endif

}  // namespace pageloom
