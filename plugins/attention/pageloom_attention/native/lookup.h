// Codes of eight bits to pairs of bfloat16 by tables, where one instruction looks up 64 bytes.

#pragma once

#include <cstdint>
#include <type_traits>

#include "codes.h"
#include "formats.h"
#include "simd.h"

namespace pageloom {

// Whether `LookUp<Element>` exists for products in format `To`.
template <typename Element, typename To>
constexpr bool LOOKS_UP = false;

template <typename Element>
class LookUp;

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
template <int MANTISSA>
constexpr bool LOOKS_UP<Float8<MANTISSA>, BFloat16Pairs> = true;
template <>
constexpr bool LOOKS_UP<Int8, BFloat16Pairs> = true;

// The bytes of the numbers with codes 0 to 127. All of them are bfloat16 numbers, and where a code
// has its sign bit set, the sign is all that differs; of Int8, that is its magnitude and sign.
template <typename Element>
class LookUp {
 public:
  LookUp() {
    alignas(64) uint8_t codes[128], low[128], high[128];
    for (int i = 0; i < 128; ++i) codes[i] = i;
    for (int i = 0; i < 128; i += LANES) {
      const Words bits = to_bfloat16(Element::decode(codes + i));
      store_low_bytes(low + i, bits);
      store_low_bytes(high + i, bits >> 8);
    }
    for (int half = 0; half < 2; ++half) {
      low_[half] = _mm512_load_si512(low + 64 * half);
      high_[half] = _mm512_load_si512(high + 64 * half);
    }
  }

  // Of four rows of 16 codes, put pairs of the first two and of the last two into `to` and `next`.
  void widen(const uint8_t* rows, int64_t stride, bfloat16* to, bfloat16* next) const {
    // Byte i of each 8 goes to where the unpacking below puts it right: rows 0 and 1 in turn in the
    // first half of each 16 bytes, rows 2 and 3 in the second.
    const __m512i order = _mm512_set_epi64(
        0x3f2f3e2e3d2d3c2c, 0x1f0f1e0e1d0d1c0c, 0x3b2b3a2a39293828, 0x1b0b1a0a19091808,
        0x3727362635253424, 0x1707160615051404, 0x3323322231213020, 0x1303120211011000);
    const auto row = [&](int i) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows + i * stride));
    };
    __m512i codes = _mm512_castsi128_si512(row(0));
    codes = _mm512_inserti32x4(codes, row(1), 1);
    codes = _mm512_inserti32x4(codes, row(2), 2);
    codes = _mm512_inserti32x4(codes, row(3), 3);
    codes = _mm512_permutexvar_epi8(order, codes);
    const __m512i sign = _mm512_and_si512(codes, _mm512_set1_epi8(-128));
    const __m512i magnitude =
        std::is_same_v<Element, Int8> ? _mm512_abs_epi8(codes) : codes;  // its high bit is ignored
    __m512i low = _mm512_permutex2var_epi8(low_[0], magnitude, low_[1]);
    __m512i high = _mm512_permutex2var_epi8(high_[0], magnitude, high_[1]);
    if constexpr (std::is_same_v<Element, Int8>) {
      const auto is_nan = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(-128));
      high = _mm512_mask_blend_epi8(is_nan, high, _mm512_set1_epi8(0x7f));
      low = _mm512_mask_blend_epi8(is_nan, low, _mm512_set1_epi8(-1));
    }
    high = _mm512_or_si512(high, sign);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(next, _mm512_unpackhi_epi8(low, high));
  }

 private:
  __m512i low_[2], high_[2];
};
#endif

}  // namespace pageloom
