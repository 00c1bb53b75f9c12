// Where the elements of a layer's cache lie, if it holds them as they come; coded.h has the others.
//
// A block holds K and then V for each KV head in turn. `width` is the head size, rounded up to
// whole groups of 16. Within K, 16 tokens (the last group of a block may have fewer) lie side by
// side, so that one vector holds the same element of several tokens:
//     K [tokens / 16] [width / PAIR] [16 tokens] [PAIR]
//     V [tokens / PAIR] [width] [PAIR tokens]
// PAIR is the format's. Kernels read K and V in tiles of 16 tokens of a sequence. Where blocks are
// multiples of 16 tokens a tile is read in place; others are gathered first.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace pageloom {

constexpr int64_t TILE = 16;  // tokens

// One layer. Read by ctypes: see cpu_paged.py.
struct Layer {
  char* cache;
  int64_t dtype;  // 0 float32, 1 bfloat16, 2 float16
  int64_t heads, kv_heads, head_size, block_size;
  int64_t window;  // tokens, 0 for none
  float scale, softcap;  // softcap 0 for none
  int64_t element;  // 0 that of dtype, 1 fp8_e4m3, 2 fp8_e5m2, 3 int8, 4 int4
  int64_t scale_per_vector;  // 1 if each coded vector carries its scale, 0 if these two hold:
  float k_scale, v_scale;

  int64_t width() const { return (head_size + 15) / 16 * 16; }
  int64_t group() const { return heads / kv_heads; }
};

inline void fetch(const void* address) { __builtin_prefetch(address, 0, 2); }

template <typename Format>
class Cache {
 public:
  using Stored = typename Format::Stored;
  using Tile = const Stored*;
  static constexpr int64_t PAIR = Format::PAIR;

  explicit Cache(const Layer& layer)
      : base_(reinterpret_cast<Stored*>(layer.cache)),
        heads_(layer.kv_heads),
        size_(layer.block_size),
        width_(layer.width()) {}

  Stored* keys(int64_t block, int64_t head) const {
    return base_ + (block * heads_ + head) * 2 * size_ * width_;
  }
  Stored* values(int64_t block, int64_t head) const { return keys(block, head) + size_ * width_; }

  // The tile that begins with token t of a sequence, where `tiles_in_place`.
  Tile key_tile(const int32_t* table, int64_t head, int64_t t) const {
    return keys(table[t / size_], head) + t % size_ * width_;
  }
  Tile value_tile(const int32_t* table, int64_t head, int64_t t) const {
    return key_tile(table, head, t) + size_ * width_;
  }

  bool tiles_in_place() const { return size_ % TILE == 0; }
  int64_t tile_size() const { return TILE * width_; }  // of type Stored

  void fetch(Tile tile) const {
    auto* start = reinterpret_cast<const char*>(tile);
    const int64_t bytes = tile_size() * sizeof(Stored);
    for (int64_t i = 0; i < bytes; i += 64) pageloom::fetch(start + i);
  }

  // Elements of one K vector: PAIR side by side at first + i * stride, for i in [0, width / PAIR).
  struct Strided {
    int64_t first, stride;
  };
  Strided key(int64_t offset) const {
    int64_t group = offset / TILE * TILE, tokens = std::min(TILE, size_ - group);
    return {group * width_ + (offset - group) * PAIR, tokens * PAIR};
  }
  // Elements of one V vector: one at first + i * stride, for i in [0, width).
  Strided value(int64_t offset) const {
    int64_t group = offset / PAIR * PAIR, tokens = std::min(PAIR, size_ - group);
    return {group * width_ + (offset - group), tokens};
  }

  // Put one token's vector of one head, `count` elements, into its slot; the rest of it becomes 0.
  void store(int64_t slot, int64_t head, const Stored* k, const Stored* v, int64_t count) const {
    int64_t block = slot / size_, offset = slot % size_;
    auto [first_key, key_stride] = key(offset);
    auto [first_value, value_stride] = value(offset);
    Stored* to_key = keys(block, head) + first_key;
    Stored* to_value = values(block, head) + first_value;
    int64_t whole = count / PAIR;
    for (int64_t i = 0; i < whole; ++i)
      std::memcpy(to_key + i * key_stride, k + i * PAIR, PAIR * sizeof(Stored));
    for (int64_t i = whole * PAIR; i < width_; ++i)
      to_key[i / PAIR * key_stride + i % PAIR] = i < count ? k[i] : Stored{};
    for (int64_t i = 0; i < count; ++i) to_value[i * value_stride] = v[i];
    for (int64_t i = count; i < width_; ++i) to_value[i * value_stride] = Stored{};
  }

  // Copy the keys of tokens begin <= t < end, which belong to the tile from token `start` on, to
  // `tile`, with 0 for the tile's other tokens. Returns that tile.
  Tile gather_keys(const int32_t* table, int64_t head, int64_t start, int64_t begin, int64_t end,
                   Stored* tile) const {
    std::fill_n(tile, tile_size(), Stored{});
    for (int64_t t = begin; t < end; ++t) {
      auto [first, stride] = key(t % size_);
      const Stored* from = keys(table[t / size_], head) + first;
      Stored* to = tile + (t - start) * PAIR;
      for (int64_t i = 0; i < width_ / PAIR; ++i)
        std::memcpy(to + i * TILE * PAIR, from + i * stride, PAIR * sizeof(Stored));
    }
    return tile;
  }

  Tile gather_values(const int32_t* table, int64_t head, int64_t start, int64_t begin, int64_t end,
                     Stored* tile) const {
    std::fill_n(tile, tile_size(), Stored{});
    for (int64_t t = begin; t < end; ++t) {
      auto [first, stride] = value(t % size_);
      const Stored* from = values(table[t / size_], head) + first;
      Stored* to = tile + (t - start) / PAIR * PAIR * width_ + (t - start) % PAIR;
      const bool whole = stride == PAIR && t % PAIR == 0 && t % size_ % PAIR == 0;
      if (whole && t + PAIR <= end) {
        std::copy_n(from, width_ * PAIR, to);
        t += PAIR - 1;
        continue;
      }
      for (int64_t i = 0; i < width_; ++i) to[i * PAIR] = from[i * stride];
    }
    return tile;
  }

  template <typename To>
  static constexpr bool LEAVES_SCALES = false;  // there are none

  // Turn a tile of K or of V into float32, without pairs.
  template <typename To>
  void widen_keys(Tile tile, float* to) const {
    Format::widen(tile, to, width_, TILE);
  }
  template <typename To>
  void widen_values(Tile tile, float* to) const {
    Format::widen(tile, to, TILE, width_);
  }

 private:
  Stored* base_;
  int64_t heads_, size_, width_;
};

}  // namespace pageloom
