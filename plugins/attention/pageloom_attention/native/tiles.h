// Which tiles of K and V a task reads, in the form that the products take.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "formats.h"
#include "layout.h"
#include "product.h"

namespace pageloom {

constexpr int64_t STEP = 256;  // tokens that are attended over at a time
constexpr int64_t STEP_TILES = STEP / TILE;

struct Task {
  int64_t sequence, kv_head;
  int64_t first_query, queries;  // query tokens, counted from the first of the sequence's
  int64_t begin, end;            // tokens to attend over
  int64_t position;              // of the first query token in the sequence
  int64_t split, splits;         // this one is number `split` of so many that share the range
  int64_t partial;               // where its rows begin among those that await a merge
};

template <typename T>
inline void grow(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// The tiles of a step in the order in which they are read: K, V, and the first of K of the next
// step.
template <typename Cache>
class TileList {
 public:
  using Stored = typename Cache::Stored;
  using Tile = typename Cache::Tile;

  struct Buffers {
    std::vector<Stored> keys, values;
  };

  TileList(const Layer& layer, const Task& task, const int32_t* table, Buffers& buffers)
      : task_(task), table_(table), buffers_(buffers), cache_(layer) {
    grow(buffers.keys, STEP_TILES * cache_.tile_size());
    grow(buffers.values, STEP_TILES * cache_.tile_size());
  }

  const Cache& cache() const { return cache_; }
  int64_t num_tiles() const { return num_tiles_; }
  const Tile* keys() const { return tiles_; }
  const Tile* values() const { return tiles_ + num_tiles_; }

  // List those of tokens [first, last), where `first` begins a tile.
  void list(int64_t first, int64_t last) {
    num_tiles_ = (last - first + TILE - 1) / TILE;
    for (int64_t i = 0; i < num_tiles_; ++i) {
      tiles_[i] = key_tile(first + i * TILE, i);
      tiles_[num_tiles_ + i] = value_tile(first + i * TILE, i);
    }
    for (int64_t i = 0; i < AHEAD; ++i) {
      const int64_t tile = last + i * TILE;
      const bool there = cache_.tiles_in_place() && tile < task_.end;
      tiles_[2 * num_tiles_ + i] =
          there ? cache_.key_tile(table_, task_.kv_head, tile) : tiles_[0];
    }
  }

  void fetch_first() const {
    if (!cache_.tiles_in_place()) return;
    const int64_t first = task_.begin / TILE * TILE;
    for (int64_t tile = first; tile < std::min(task_.end, first + AHEAD * TILE); tile += TILE)
      cache_.fetch(cache_.key_tile(table_, task_.kv_head, tile));
  }

 private:
  // K of tile number i, which begins with token `tile`. Tokens that the task has no part in get
  // scores too, which are thrown away.
  Tile key_tile(int64_t tile, int64_t i) {
    if (cache_.tiles_in_place()) return cache_.key_tile(table_, task_.kv_head, tile);
    return cache_.gather_keys(table_, task_.kv_head, tile, begin(tile), end(tile),
                              buffers_.keys.data() + i * cache_.tile_size());
  }

  // The same for V. Slots that the task has no part in may hold NaN, which a weight of 0 does not
  // undo, so a tile with such slots is copied without them.
  Tile value_tile(int64_t tile, int64_t i) {
    if (cache_.tiles_in_place() && end(tile) - begin(tile) == TILE)
      return cache_.value_tile(table_, task_.kv_head, tile);
    return cache_.gather_values(table_, task_.kv_head, tile, begin(tile), end(tile),
                                buffers_.values.data() + i * cache_.tile_size());
  }

  int64_t begin(int64_t tile) const { return std::max(tile, task_.begin); }
  int64_t end(int64_t tile) const { return std::min(tile + TILE, task_.end); }

  const Task& task_;
  const int32_t* table_;
  Buffers& buffers_;
  const Cache cache_;
  int64_t num_tiles_ = 0;
  Tile tiles_[2 * STEP_TILES + AHEAD];
};

// `keys(i, n)` and `values(i, n)` give tiles i to i + n - 1 of a step, and AHEAD more for fetching;
// n is at most AT_ONCE, and what was given before is then lost. Where HAS_SCALES, each token's
// score and weight are still to be multiplied by its scales.

// Products read the cache where it lies.
template <typename Format>
class StoredTiles : public TileList<Cache<Format>> {
 public:
  using Computed = Format;
  using TileList<Cache<Format>>::TileList;
  static constexpr int64_t AT_ONCE = STEP_TILES;
  static constexpr bool HAS_SCALES = false;

  auto* keys(int64_t i, int64_t) const { return TileList<Cache<Format>>::keys() + i; }
  auto* values(int64_t i, int64_t) const { return TileList<Cache<Format>>::values() + i; }
};

// Tiles are turned into another format, a few at a time, so that they are still in the L1 cache
// when they are multiplied.
template <typename Cache, typename To>
class WidenedTiles : public TileList<Cache> {
 public:
  using Computed = To;
  using Stored = typename To::Stored;
  static constexpr int64_t AT_ONCE = 4;
  static constexpr bool HAS_SCALES = Cache::template LEAVES_SCALES<To>;

  struct Buffers : TileList<Cache>::Buffers {
    std::vector<Stored> wide;
  };

  WidenedTiles(const Layer& layer, const Task& task, const int32_t* table, Buffers& buffers)
      : TileList<Cache>(layer, task, table, buffers) {
    const int64_t size = TILE * layer.width();
    grow(buffers.wide, AT_ONCE * size);
    // There is nothing to fetch once they are wide.
    std::fill_n(wide_, AT_ONCE + AHEAD, buffers.wide.data());
    for (int64_t i = 0; i < AT_ONCE; ++i) wide_[i] = buffers.wide.data() + i * size;
  }

  void list(int64_t first, int64_t last) {
    TileList<Cache>::list(first, last);
    if constexpr (HAS_SCALES)
      for (int64_t i = 0; i < this->num_tiles(); ++i) {
        const auto k = this->cache().key_scales(TileList<Cache>::keys()[i]);
        const auto v = this->cache().value_scales(TileList<Cache>::values()[i]);
        std::copy_n(k.scale, TILE, key_scales_ + i * TILE);
        std::copy_n(v.scale, TILE, value_scales_ + i * TILE);
      }
  }
  // By token of the step.
  const float* key_scales() const { return key_scales_; }
  const float* value_scales() const { return value_scales_; }

  const Stored* const* keys(int64_t i, int64_t n) {
    widen(TileList<Cache>::keys() + i, n, [&](const auto& tile, Stored* to) {
      this->cache().template widen_keys<To>(tile, to);
    });
    return wide_;
  }
  const Stored* const* values(int64_t i, int64_t n) {
    widen(TileList<Cache>::values() + i, n, [&](const auto& tile, Stored* to) {
      this->cache().template widen_values<To>(tile, to);
    });
    return wide_;
  }

 private:
  // Not inlined: its constants would take registers from the products.
  template <typename Widen>
  __attribute__((noinline)) void widen(const typename Cache::Tile* tiles, int64_t n,
                                       Widen widen_tile) {
    for (int64_t i = 0; i < n; ++i) {
      this->cache().fetch(tiles[i + AHEAD]);
      widen_tile(tiles[i], wide_[i]);
    }
  }

  Stored* wide_[AT_ONCE + AHEAD];
  float key_scales_[HAS_SCALES ? STEP : 1], value_scales_[HAS_SCALES ? STEP : 1];
};

}  // namespace pageloom
