// A layer's cache of coded vectors: the same bytes for every dtype.
//
// A block holds for each KV head in turn the codes of K and of V, and then, if vectors carry their
// own scale, the scales of K and of V, 4 bytes a token. 16 tokens of K (the last group of a block
// may have fewer) lie side by side; V lies token by token:
//     K [tokens / 16] [width / PER_BYTE] [16 tokens]
//     V [tokens] [width / PER_BYTE]
// So no two tokens share a byte. Where two codes do, those are elements 2 i and 2 i + 1 of K, and
// elements i and i + 8 of 16 of V. Tiles are decoded before they are used.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>

#include "codes.h"
#include "layout.h"
#include "lookup.h"
#include "simd.h"

namespace pageloom {

// 16 codes, a byte each, of a row of a tile, and 16 of the next row.
struct CodePointers {
  const uint8_t *even, *odd;
};
struct UnpackedCodes {
  uint8_t even[16], odd[16];
};

// From bytes that hold a code of both rows each.
inline UnpackedCodes unpack_both(const uint8_t* bytes) {
  typedef uint8_t Codes __attribute__((vector_size(16)));
  Codes packed;
  std::memcpy(&packed, bytes, sizeof packed);
  const Codes even = packed & 15, odd = packed >> 4;
  UnpackedCodes result;
  std::memcpy(result.even, &even, sizeof even);
  std::memcpy(result.odd, &odd, sizeof odd);
  return result;
}

// From 8 bytes: the codes in their low halves, then those in their high halves.
inline void unpack(const uint8_t* bytes, uint8_t* codes) {
  typedef uint64_t Eights __attribute__((vector_size(16)));
  uint64_t packed;
  std::memcpy(&packed, bytes, sizeof packed);
  const Eights both = Eights{packed, packed} >> Eights{0, 4} & 0x0f0f0f0f0f0f0f0f;
  std::memcpy(codes, &both, sizeof both);
}

struct CodedTile {
  const uint8_t *codes, *scales;
};

// What makes numbers of codes: code * scale + bias, with those of each token of a tile.
struct TileScales {
  float scale[TILE], bias[TILE] = {};
};

// How one vector is coded: (x limited to -limit .. limit, less bias) * inverse.
struct Coding {
  float limit, bias, inverse;
  uint8_t scale[4] = {};  // as it is stored, if it is
};

template <typename T>
constexpr float LARGEST = std::numeric_limits<float>::max();
template <>
constexpr float LARGEST<bfloat16> = 0x1.fep127f;
template <>
constexpr float LARGEST<float16> = 65504;

// To float16 and back.
inline float round_to_float16(float x, uint8_t* stored) {
  float16 rounded[LANES];
  pageloom::store(rounded, spread(x));
  std::memcpy(stored, rounded, 2);
  return load(rounded)[0];
}

// The scale whose codes come nearest to a vector, `least` being the least that clips none of them.
template <typename Element, typename T>
float fitted(const T* x, int64_t count, float most, float least) {
  float scales[FITS], inverses[FITS], scale = least, best = -NEGATIVE_INFINITY;
  for (int i = 0; i < FITS; ++i) {
    scales[i] = least * POWERS[i];
    inverses[i] = 1 / scales[i] / Element::UNIT;
  }
  Vector squares[FITS] = {};  // of whole numbers, whose sum is the same in any order
  for (int64_t d = 0; d < count; d += LANES) {
    const Vector part = absolute(limited(load_part(x + d, count - d), -most, most));
    for (int i = 0; i < FITS; ++i) {
      const Vector error = rounded(Element::error(part * inverses[i]));
      squares[i] += error * error;
    }
  }
  for (int i = 0; i < FITS; ++i) {
    const float growth = i < FITS / 2 ? POWERS[2 * i] : 2 * POWERS[2 * i - FITS];  // squared
    const float error = sum(squares[i]) * growth;
    if (error < best) best = error, scale = scales[i];
  }
  return scale;
}

template <typename Element, typename T>
Coding measure(const T* x, int64_t count) {
  constexpr double MARGIN = 0.875;  // as the layout has it
  Coding coding = {float(MARGIN * (Element::IS_AFFINE ? 65504.0 : double(LARGEST<T>))), 0, 1, {}};
  const float first = load_part(x, 1)[0];
  Vector least = spread(first), most = least, nan = {};
  for (int64_t d = 0; d < count; d += LANES) {
    T part[LANES];
    std::fill_n(part, LANES, x[d]);
    std::memcpy(part, x + d, std::min<int64_t>(LANES, count - d) * sizeof(T));
    Vector now = limited(load(part), -coding.limit, coding.limit);
    least = now < least ? now : least;
    most = now > most ? now : most;
    nan = now != now ? now : nan;
  }
  least = limited(least, -coding.limit, coding.limit);
  most = limited(most, -coding.limit, coding.limit);
  const float any_nan = sum(nan), low = -largest(-least) + any_nan, high = largest(most) + any_nan;
  if constexpr (Element::IS_AFFINE) {
    coding.bias = round_to_float16(low, coding.scale + 2);
    const float step = (high - coding.bias) / Element::LIMIT;
    coding.inverse = 1 / round_to_float16(step < 0x1p-24f ? 0x1p-24f : step, coding.scale);
  } else {
    const float size = -low > high ? -low : high;
    float scale = (size < 0x1p-100f ? 0x1p-100f : size) / Element::LIMIT;
    if constexpr (Element::IS_FITTED) scale = fitted<Element>(x, count, coding.limit, scale);
    std::memcpy(coding.scale, &scale, sizeof scale);
    coding.inverse = 1 / scale;
  }
  return coding;
}

template <typename Element>
class CodedCache {
 public:
  using Stored = uint8_t;
  using Tile = CodedTile;
  static constexpr int PER_BYTE = Element::PER_BYTE;

  explicit CodedCache(const Layer& layer)
      : base_(reinterpret_cast<uint8_t*>(layer.cache)),
        heads_(layer.kv_heads),
        size_(layer.block_size),
        width_(layer.width()),
        row_(layer.width() / PER_BYTE),
        scale_bytes_(layer.scale_per_vector ? 4 : 0),
        constant_{layer.k_scale, layer.v_scale} {}

  bool tiles_in_place() const { return size_ % TILE == 0; }
  int64_t tile_size() const { return TILE * (row_ + scale_bytes_); }

  // The tile that begins with token t of a sequence, where `tiles_in_place`.
  Tile key_tile(const int32_t* table, int64_t head, int64_t t) const {
    uint8_t* at = place(table[t / size_], head);
    return {at + t % size_ * row_, scale(at, t % size_, false)};
  }
  Tile value_tile(const int32_t* table, int64_t head, int64_t t) const {
    uint8_t* at = place(table[t / size_], head);
    return {at + (size_ + t % size_) * row_, scale(at, t % size_, true)};
  }

  void fetch(const Tile& tile) const {
    for (int64_t i = 0; i < TILE * row_; i += 64) pageloom::fetch(tile.codes + i);
    if (scale_bytes_) pageloom::fetch(tile.scales);
  }

  // As those of Cache, in layout.h.
  template <typename T>
  void store(int64_t slot, int64_t head, const T* k, const T* v, int64_t count) const {
    uint8_t* at = place(slot / size_, head);
    const int64_t offset = slot % size_, group = offset / TILE * TILE;
    const int64_t tokens = std::min(TILE, size_ - group);
    uint8_t* key = at + group * row_ + (offset - group);
    encode(k, count, constant_[0], scale(at, offset, false), [&](int64_t d, const uint8_t* codes) {
      for (int64_t i = 0; i < 16 / PER_BYTE; ++i)
        key[(d / PER_BYTE + i) * tokens] =
            PER_BYTE == 1 ? codes[i] : codes[2 * i] | codes[2 * i + 1] << 4;
    });
    uint8_t* value = at + (size_ + offset) * row_;
    encode(v, count, constant_[1], scale(at, offset, true), [&](int64_t d, const uint8_t* codes) {
      for (int64_t i = 0; i < 16 / PER_BYTE; ++i)
        value[d / PER_BYTE + i] = PER_BYTE == 1 ? codes[i] : codes[i] | codes[i + 8] << 4;
    });
  }

  Tile gather_keys(const int32_t* table, int64_t head, int64_t start, int64_t begin, int64_t end,
                   uint8_t* tile) const {
    clear(tile);
    for (int64_t t = begin; t < end; ++t) {
      uint8_t* at = place(table[t / size_], head);
      const int64_t offset = t % size_, group = offset / TILE * TILE;
      const int64_t tokens = std::min(TILE, size_ - group);
      const uint8_t* from = at + group * row_ + (offset - group);
      for (int64_t i = 0; i < row_; ++i) tile[i * TILE + t - start] = from[i * tokens];
      std::memcpy(scales(tile) + (t - start) * 4, scale(at, offset, false), scale_bytes_);
    }
    return {tile, scales(tile)};
  }

  Tile gather_values(const int32_t* table, int64_t head, int64_t start, int64_t begin, int64_t end,
                     uint8_t* tile) const {
    clear(tile);
    for (int64_t t = begin; t < end; ++t) {
      uint8_t* at = place(table[t / size_], head);
      std::memcpy(tile + (t - start) * row_, at + (size_ + t % size_) * row_, row_);
      std::memcpy(scales(tile) + (t - start) * 4, scale(at, t % size_, true), scale_bytes_);
    }
    return {tile, scales(tile)};
  }

  // Whether tiles widened to format `To` are still to be multiplied by their scales.
  template <typename To>
  static constexpr bool LEAVES_SCALES = LOOKS_UP<Element, To>;

  // Decode K to [width / PAIR, TILE, PAIR] and V to [TILE / PAIR, width, PAIR] of format `To`.
  template <typename To>
  void widen_keys(const Tile& tile, typename To::Stored* to) const {
    const int64_t width = width_;  // what is stored to is no alias of this
    if constexpr (LEAVES_SCALES<To>) {
      static const LookUp<Element> look_up;
      for (int64_t d = 0; d < width; d += 4)
        look_up.widen(tile.codes + d * TILE, TILE, to + d * TILE, to + (d + 2) * TILE);
    } else {
      const TileScales s = key_scales(tile);
      for (int64_t d = 0; d < width; d += 2) {
        const auto codes = key_codes(tile.codes + d / PER_BYTE * TILE);
        for (int64_t t = 0; t < TILE; t += LANES) {
          const Vector scale = load(s.scale + t), bias = load(s.bias + t);
          To::store_rows(to, d, TILE, t, Element::decode(codes.even + t) * scale + bias,
                         Element::decode(codes.odd + t) * scale + bias);
        }
      }
    }
  }

  template <typename To>
  void widen_values(const Tile& tile, typename To::Stored* to) const {
    const int64_t width = width_, row = row_;
    if constexpr (LEAVES_SCALES<To>) {
      static const LookUp<Element> look_up;
      for (int64_t t = 0; t < TILE; t += 4)
        for (int64_t d = 0; d < width; d += 16)
          look_up.widen(tile.codes + t * row + d, row, to + t * width + 2 * d,
                        to + (t + 2) * width + 2 * d);
    } else {
      const TileScales s = value_scales(tile);
      for (int64_t t = 0; t < TILE; t += 2) {
        const Vector scale = spread(s.scale[t]), next_scale = spread(s.scale[t + 1]);
        const Vector bias = spread(s.bias[t]), next_bias = spread(s.bias[t + 1]);
        for (int64_t d = 0; d < width; d += 16) {
          const auto codes = value_codes(tile.codes + t * row + d / PER_BYTE, row);
          for (int64_t i = 0; i < 16; i += LANES)
            To::store_rows(to, t, width, d + i, Element::decode(codes.even + i) * scale + bias,
                           Element::decode(codes.odd + i) * next_scale + next_bias);
        }
      }
    }
  }

  TileScales key_scales(const Tile& tile) const { return read_scales(tile, constant_[0]); }
  TileScales value_scales(const Tile& tile) const { return read_scales(tile, constant_[1]); }

 private:
  uint8_t* place(int64_t block, int64_t head) const {
    return base_ + (block * heads_ + head) * 2 * size_ * (row_ + scale_bytes_);
  }
  uint8_t* scale(uint8_t* place, int64_t offset, bool is_value) const {
    return place + 2 * size_ * row_ + (is_value * size_ + offset) * scale_bytes_;
  }
  // Those of a gathered tile.
  uint8_t* scales(uint8_t* tile) const { return tile + TILE * row_; }

  void clear(uint8_t* tile) const {
    std::fill_n(tile, TILE * row_, Element::ZERO);
    std::fill_n(scales(tile), TILE * scale_bytes_, uint8_t{});
  }

  // Call put(d, codes) with the codes of elements d to d + 15, one in each byte, for all of them.
  template <typename T, typename Put>
  void encode(const T* x, int64_t count, float constant, uint8_t* scale, Put put) const {
    const bool measured = Element::IS_AFFINE || scale_bytes_;
    const Coding coding = measured ? measure<Element>(x, count)
                                   : Coding{-NEGATIVE_INFINITY, 0, 1 / constant, {}};
    std::memcpy(scale, coding.scale, scale_bytes_);
    for (int64_t d = 0; d < width_; d += 16) {
      uint8_t codes[16];
      for (int64_t i = 0; i < 16; i += LANES) {
        Vector part = limited(load_part(x + d + i, count - d - i), -coding.limit, coding.limit);
        Element::encode(codes + i, (part - coding.bias) * coding.inverse);
      }
      put(d, codes);
    }
  }

  TileScales read_scales(const Tile& tile, float constant) const {
    TileScales result;
    if constexpr (Element::IS_AFFINE) {
      float16 scale[TILE], bias[TILE];
      for (int64_t t = 0; t < TILE; ++t) {
        std::memcpy(scale + t, tile.scales + 4 * t, 2);
        std::memcpy(bias + t, tile.scales + 4 * t + 2, 2);
      }
      for (int64_t t = 0; t < TILE; t += LANES) {
        pageloom::store(result.scale + t, load(scale + t));
        pageloom::store(result.bias + t, load(bias + t));
      }
    } else if (scale_bytes_) {
      std::memcpy(result.scale, tile.scales, sizeof result.scale);
    } else {
      std::fill_n(result.scale, TILE, constant);
    }
    return result;
  }

  // 16 tokens of the two elements whose codes begin here.
  static auto key_codes(const uint8_t* at) {
    if constexpr (PER_BYTE == 2) {
      return unpack_both(at);
    } else {
      return CodePointers{at, at + TILE};
    }
  }
  // 16 elements of the token whose codes begin here, and of the next token, `row` bytes on.
  static auto value_codes(const uint8_t* at, int64_t row) {
    if constexpr (PER_BYTE == 2) {
      UnpackedCodes result;
      unpack(at, result.even);
      unpack(at + row, result.odd);
      return result;
    } else {
      return CodePointers{at, at + row};
    }
  }

  uint8_t* base_;
  int64_t heads_, size_, width_, row_, scale_bytes_;
  float constant_[2];  // of K and V
};

}  // namespace pageloom
