// Attention of some query tokens of one sequence, for the query heads of one KV head, over a range
// of the sequence's tokens.
//
// The heads of a group times the query tokens are the rows of two matrix products, so that each K
// and V row is read once for all of them. Softmax is computed online (Milakov and Gimelshein 2018;
// Dao et al. 2022, "FlashAttention"), STEP tokens at a time, in powers of two.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "layout.h"
#include "product.h"
#include "rotary.h"
#include "simd.h"
#include "tiles.h"

namespace pageloom {

// What a row has summed up: exponentials in base 2 relative to `largest`.
struct Sums {
  float largest = NEGATIVE_INFINITY, total = 0;
};

// Buffers of one thread. After a task, `result` [rows, width], still to be divided by the totals,
// and `sums` [rows] hold what it found.
template <typename Tiles>
struct Workspace {
  using Operand = typename Tiles::Computed::Operand;
  std::vector<Operand> queries, weights;
  typename Tiles::Buffers tiles;
  std::vector<float> scores, result;
  std::vector<Sums> sums;

  void start(int64_t rows, int64_t width) {
    grow(queries, rows * width);
    grow(weights, rows * STEP);
    grow(scores, rows * STEP);
    result.assign(rows * width, 0.0f);
    sums.assign(rows, Sums{});
  }
};

inline void multiply(float* x, const float* factors, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) store(x + i, load(x + i) * load(factors + i));
}

// Turn one row of scores, of which those in [begin, end) are seen, into weights
// 2^(score - largest), and bring its sums up to date. The weights are stored multiplied by
// `factors`, if there are any. Returns what the row's former result must be multiplied by.
template <typename Format>
float soften(const Layer& layer, float* scores, int64_t count, int64_t begin, int64_t end,
             const float* factors, typename Format::Operand* weights, Sums& sums) {
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
    store(weights + i, factors ? weight * load(factors + i) : weight);
  }
  const float correction = power_of_two(spread(sums.largest - largest_now))[0];
  sums.total = sums.total * correction + sum(total);
  sums.largest = largest_now;
  return correction;
}

// `Tiles` is StoredTiles or WidenedTiles of tiles.h.
template <typename Tiles>
class Attention {
 public:
  using Computed = typename Tiles::Computed;

  Attention(const Layer& layer, const Task& task, const int32_t* table, Workspace<Tiles>& work)
      : layer_(layer),
        task_(task),
        work_(work),
        tiles_(layer, task, table, work.tiles),
        width_(layer.width()),
        group_(layer.group()),
        rows_(task.queries * layer.group()) {}

  // `q` is the first query token's first head of the group, and `rotary` begins with that token;
  // the result is left in the workspace.
  template <typename T>
  void run(const T* q, int64_t q_stride, const Rotary<T>& rotary) {
    tiles_.fetch_first();
    work_.start(rows_, width_);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t size = layer_.head_size, token = row / group_;
      const T* from = q + token * q_stride + row % group_ * size;
      auto* query = work_.queries.data() + row * width_;
      if (rotary) {
        rotate(from, rotary.from(token, size), size, query);
        std::fill(query + size, query + width_, typename Computed::Operand{});
      } else {
        for (int64_t d = 0; d < width_; d += LANES) store(query + d, load_part(from + d, size - d));
      }
    }
    for (int64_t start = task_.begin / STEP * STEP; start < task_.end; start += STEP)
      step(std::max(start, task_.begin / TILE * TILE), std::min(start + STEP, task_.end));
  }

 private:
  // Attend over tokens [first, last), where `first` begins a tile.
  void step(int64_t first, int64_t last) {
    const int64_t num_tiles = (last - first + TILE - 1) / TILE;
    tiles_.list(first, last);
    for (int64_t i = 0; i < num_tiles; i += Tiles::AT_ONCE) {
      const int64_t n = std::min(Tiles::AT_ONCE, num_tiles - i);
      multiply_keys<Computed>(work_.queries.data(), rows_, width_, tiles_.keys(i, n), n,
                              work_.scores.data() + i * TILE, STEP);
    }
    for (int64_t row = 0; row < rows_; ++row) soften_row(row, first, last, num_tiles * TILE);
    for (int64_t i = 0; i < num_tiles; i += Tiles::AT_ONCE) {
      const int64_t n = std::min(Tiles::AT_ONCE, num_tiles - i);
      add_values<Computed>(work_.weights.data() + i * TILE, rows_, STEP, tiles_.values(i, n), n,
                           work_.result.data(), width_);
    }
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
    float* scores = work_.scores.data() + row * STEP;
    const float* factors = nullptr;
    if constexpr (Tiles::HAS_SCALES) {
      multiply(scores, tiles_.key_scales(), count);
      factors = tiles_.value_scales();
    }
    const float correction = soften<Computed>(layer_, scores, count, begin, end, factors, weights,
                                              work_.sums[row]);
    if (correction == 1.0f) return;
    float* result = work_.result.data() + row * width_;
    for (int64_t d = 0; d < width_; d += LANES) store(result + d, load(result + d) * correction);
  }

  const Layer& layer_;
  const Task& task_;
  Workspace<Tiles>& work_;
  Tiles tiles_;
  const int64_t width_, group_, rows_;
};

}  // namespace pageloom
