// Attention of some query tokens of one sequence, for the query heads of one KV head, over a range
// of the sequence's tokens.
//
// The heads of a group times the query tokens are the rows of two matrix products, so that each K
// and V row is read once for all of them. Softmax is computed online (Milakov and Gimelshein 2018;
// Dao et al. 2022, "FlashAttention"), STEP tokens at a time, in powers of two.

#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "layout.h"
#include "product.h"
#include "simd.h"

namespace pageloom {

constexpr int64_t STEP = 256;  // tokens
constexpr int64_t STEP_TILES = STEP / TILE;

struct Task {
  int64_t sequence, kv_head;
  int64_t first_query, queries;  // query tokens, counted from the first of the sequence's
  int64_t begin, end;            // tokens to attend over
  int64_t position;              // of the first query token in the sequence
  int64_t split, splits;         // this one is number `split` of so many that share the range
  int64_t partial;               // where its rows begin among those that await a merge
};

// What a row has summed up: exponentials in base 2 relative to `largest`.
struct Sums {
  float largest = NEGATIVE_INFINITY, total = 0;
};

template <typename T>
inline void grow(std::vector<T>& buffer, size_t size) {
  if (buffer.size() < size) buffer.resize(size);
}

// Buffers of one thread, for a cache in one format and products in another. After a task, `result`
// [rows, width], still to be divided by the totals, and `sums` [rows] hold what it found.
template <typename Format, typename Computed>
struct Workspace {
  std::vector<typename Computed::Operand> queries, weights;
  std::vector<typename Format::Stored> gathered_keys, gathered_values;
  std::vector<float> scores, result, wide;
  std::vector<Sums> sums;

  void start(int64_t rows, int64_t width) {
    grow(queries, rows * width);
    grow(weights, rows * STEP);
    grow(gathered_keys, STEP * width);
    grow(gathered_values, STEP * width);
    grow(scores, rows * STEP);
    result.assign(rows * width, 0.0f);
    sums.assign(rows, Sums{});
  }
};

// Turn one row of scores, of which those in [begin, end) are seen, into weights
// 2^(score - largest), and bring its sums up to date. Returns what the row's former result must be
// multiplied by.
template <typename Format>
float soften(const Layer& layer, float* scores, int64_t count, int64_t begin, int64_t end,
             typename Format::Operand* weights, Sums& sums) {
  float factor = layer.scale * LOG2_E;
  if (layer.softcap > 0) {
    for (int64_t i = 0; i < count; i += LANES)
      store(scores + i, layer.softcap * tanh(load(scores + i) * (layer.scale / layer.softcap)));
    factor = LOG2_E;
  }
  std::fill(scores, scores + begin, NEGATIVE_INFINITY);
  std::fill(scores + end, scores + count, NEGATIVE_INFINITY);
  Vector most = spread(NEGATIVE_INFINITY);
  for (int64_t i = 0; i < count; i += LANES) most = larger(load(scores + i), most);
  const float largest_now = std::max(sums.largest, largest(most) * factor);
  Vector total = {};
  for (int64_t i = 0; i < count; i += LANES) {
    Vector weight = power_of_two(load(scores + i) * factor - largest_now);
    total += weight;
    store(weights + i, weight);
  }
  const float correction = power_of_two(spread(sums.largest - largest_now))[0];
  sums.total = sums.total * correction + sum(total);
  sums.largest = largest_now;
  return correction;
}

// `Computed` is the cache's format, or Single<float> for tiles that are widened first.
template <typename Format, typename Computed>
class Attention {
 public:
  using Stored = typename Format::Stored;
  static constexpr bool WIDENS = !std::is_same_v<Format, Computed>;

  Attention(const Layer& layer, const Task& task, const int32_t* table,
            Workspace<Format, Computed>& work)
      : layer_(layer),
        task_(task),
        table_(table),
        work_(work),
        cache_(layer),
        width_(layer.width()),
        group_(layer.group()),
        rows_(task.queries * layer.group()) {}

  // `q` is the first query token's first head of the group; the result is left in the workspace.
  template <typename T>
  void run(const T* q, int64_t q_stride) {
    fetch_first_tiles();
    work_.start(rows_, width_);
    for (int64_t row = 0; row < rows_; ++row) {
      const T* from = q + row / group_ * q_stride + row % group_ * layer_.head_size;
      for (int64_t d = 0; d < width_; d += LANES)
        store(work_.queries.data() + row * width_ + d,
              load_part(from + d, layer_.head_size - d));
    }
    for (int64_t start = task_.begin / STEP * STEP; start < task_.end; start += STEP)
      step(std::max(start, task_.begin / TILE * TILE), std::min(start + STEP, task_.end));
  }

 private:
  // Attend over tokens [first, last), where `first` begins a tile.
  void step(int64_t first, int64_t last) {
    const int64_t num_tiles = (last - first + TILE - 1) / TILE;
    // In the order in which they are read: K, V, and K of the next step.
    const Stored* tiles[2 * STEP_TILES + AHEAD];
    for (int64_t i = 0; i < num_tiles; ++i) {
      tiles[i] = keys(first, i);
      tiles[num_tiles + i] = values(first, i);
    }
    for (int64_t i = 0; i < AHEAD; ++i) {
      const int64_t tile = last + i * TILE;
      const bool there = cache_.tiles_in_place() && tile < task_.end;
      tiles[2 * num_tiles + i] =
          there ? cache_.key_tile(table_, task_.kv_head, tile) : work_.gathered_keys.data();
    }
    if constexpr (WIDENS) {
      const float* wide[2 * STEP_TILES + AHEAD];
      widen(tiles, num_tiles, wide);
      multiply(wide, first, last);
    } else {
      multiply(tiles, first, last);
    }
  }

  // `tiles` are those of K, of V, and AHEAD more.
  void multiply(const typename Computed::Stored* const* tiles, int64_t first, int64_t last) {
    const int64_t num_tiles = (last - first + TILE - 1) / TILE;
    multiply_keys<Computed>(work_.queries.data(), rows_, width_, tiles, num_tiles,
                            work_.scores.data(), STEP);
    for (int64_t row = 0; row < rows_; ++row) soften_row(row, first, last, num_tiles * TILE);
    add_values<Computed>(work_.weights.data(), rows_, STEP, tiles + num_tiles, num_tiles,
                         work_.result.data(), width_);
  }

  // Put the tiles of K and V into `wide` as float32.
  void widen(const Stored* const* tiles, int64_t num_tiles, const float** wide) {
    const int64_t elements = cache_.tile_elements();
    grow(work_.wide, 2 * STEP_TILES * elements);
    for (int64_t i = 0; i < 2 * num_tiles; ++i) {
      float* own = work_.wide.data() + i * elements;
      const bool is_key = i < num_tiles;
      Format::widen(tiles[i], own, is_key ? width_ : TILE, is_key ? TILE : width_);
      wide[i] = own;
    }
    // There is nothing to fetch: what many rows wait for is arithmetic.
    std::fill_n(wide + 2 * num_tiles, AHEAD, work_.wide.data());
  }

  void soften_row(int64_t row, int64_t first, int64_t last, int64_t count) {
    const int64_t position = task_.position + row / group_;
    const int64_t seen_from = layer_.window ? position + 1 - layer_.window : 0;
    const int64_t begin = std::max(std::max(task_.begin, seen_from), first) - first;
    const int64_t end = std::min(last, position + 1) - first;
    auto* weights = work_.weights.data() + row * STEP;
    if (begin >= end) {
      std::fill_n(weights, count, typename Computed::Operand{});
      return;
    }
    const float correction = soften<Computed>(layer_, work_.scores.data() + row * STEP, count,
                                              begin, end, weights, work_.sums[row]);
    if (correction == 1.0f) return;
    float* result = work_.result.data() + row * width_;
    for (int64_t d = 0; d < width_; d += LANES) store(result + d, load(result + d) * correction);
  }

  // K of tile number i from token `first` on. Tokens that the task has no part in get scores too,
  // which are thrown away.
  const Stored* keys(int64_t first, int64_t i) {
    const int64_t tile = first + i * TILE;
    if (cache_.tiles_in_place()) return cache_.key_tile(table_, task_.kv_head, tile);
    Stored* own = work_.gathered_keys.data() + i * cache_.tile_elements();
    cache_.gather_keys(table_, task_.kv_head, tile, begin(tile), end(tile), own);
    return own;
  }

  // The same for V. Slots that the task has no part in may hold NaN, which a weight of 0 does not
  // undo, so a tile with such slots is copied without them.
  const Stored* values(int64_t first, int64_t i) {
    const int64_t tile = first + i * TILE;
    if (cache_.tiles_in_place() && end(tile) - begin(tile) == TILE)
      return cache_.value_tile(table_, task_.kv_head, tile);
    Stored* own = work_.gathered_values.data() + i * cache_.tile_elements();
    cache_.gather_values(table_, task_.kv_head, tile, begin(tile), end(tile), own);
    return own;
  }

  int64_t begin(int64_t tile) const { return std::max(tile, task_.begin); }
  int64_t end(int64_t tile) const { return std::min(tile + TILE, task_.end); }

  void fetch_first_tiles() const {
    if (!cache_.tiles_in_place()) return;
    const int64_t first = task_.begin / TILE * TILE;
    for (int64_t tile = first; tile < std::min(task_.end, first + AHEAD * TILE); tile += TILE) {
      auto* start = reinterpret_cast<const char*>(cache_.key_tile(table_, task_.kv_head, tile));
      const int64_t bytes = cache_.tile_elements() * sizeof(Stored);
      for (int64_t i = 0; i < bytes; i += 64) fetch(start + i);
    }
  }

  const Layer& layer_;
  const Task& task_;
  const int32_t* table_;
  Workspace<Format, Computed>& work_;
  const Cache<Format> cache_;
  const int64_t width_, group_, rows_;
};

}  // namespace pageloom
