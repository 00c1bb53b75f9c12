// Rotary position embedding (Su et al. 2021, arXiv:2104.09864) of q and k as they are read.

#pragma once

#include <cstdint>

#include "simd.h"

namespace pageloom {

// Cosines and signed sines of each query token, [tokens, head_size], or null where q and k are not
// to be rotated. Halves of a row of `cos` are equal; those of a row of `sin` have opposite signs.
template <typename T>
struct Rotary {
  const T *cos, *sin;

  explicit operator bool() const { return cos; }
  Rotary from(int64_t token, int64_t head_size) const {
    return {cos + token * head_size, sin + token * head_size};
  }
};

// Rotate one vector of an even number of elements by the first row of `rotary`.
template <typename T, typename To>
void rotate(const T* x, const Rotary<T>& rotary, int64_t size, To* to) {
  const int64_t half = size / 2;
  for (int64_t d = 0; d < half; d += LANES) {
    const int64_t left = half - d;
    const Vector low = load_part(x + d, left), high = load_part(x + half + d, left);
    const Vector cos = load_part(rotary.cos + d, left), sin = load_part(rotary.sin + half + d, left);
    store_part(to + d, low * cos - high * sin, left);
    store_part(to + half + d, high * cos + low * sin, left);
  }
}

}  // namespace pageloom
