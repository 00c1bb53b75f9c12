// Products of a few to some hundred rows with tiles of the cache.
//
// Both are computed ROWS x COLUMNS registers of the result at a time, which stay in registers while
// the summed axis is walked through. Each element of a result is one sum in the order of that axis,
// whatever the number of rows, so results do not depend on how work is cut into rows.

#pragma once

#include <cstdint>
#include <utility>

#include "formats.h"
#include "layout.h"
#include "simd.h"

namespace pageloom {

// Tiles are fetched into the L2 cache while this many others, read before them, are computed with:
// the gaps between blocks defeat the CPU's own prefetching. Farther ahead was slower.
constexpr int64_t AHEAD = 4;

// COUNT columns of the tiles that are summed over now, and of those to come.
template <typename Format, int COUNT>
struct Columns {
  const typename Format::Stored *now[COUNT], *ahead[COUNT];
};

// Over `steps`,
//     sums[r][c] += operands[r * row + step * PAIR ...] * columns.now[c][step * stride ...]
template <typename Format, int R, int C>
inline void accumulate(Vector (&sums)[R][C], const typename Format::Operand* operands, int64_t row,
                       const Columns<Format, C>& columns, int64_t stride, int64_t steps,
                       bool fetch_ahead) {
  for (int64_t step = 0; step < steps; ++step) {
    if (fetch_ahead)
      for (int c = 0; c < C; ++c) fetch(columns.ahead[c] + step * stride);
    typename Format::Loaded loaded[C];
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c) loaded[c] = Format::load_stored(columns.now[c] + step * stride);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      auto factor = Format::spread_operand(operands + r * row + step * Format::PAIR);
#pragma GCC unroll 8
      for (int c = 0; c < C; ++c) sums[r][c] = Format::multiply_add(sums[r][c], loaded[c], factor);
    }
  }
}

// Call run(first row, number of rows) with a number known at compile time, at most ROWS, over rows
// that are shared out evenly, so that no call has much fewer rows than another.
template <typename Run, int... R>
inline void run_rows(int64_t first, int64_t count, Run run, std::integer_sequence<int, R...>) {
  const auto run_if = [&](auto number) {
    if (count == number) run(first, number);
  };
  (run_if(std::integral_constant<int, R + 1>{}), ...);
}
template <typename Run>
inline void for_each_rows(int64_t rows, Run run) {
  const int64_t parts = (rows + ROWS - 1) / ROWS;
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = rows * part / parts, last = rows * (part + 1) / parts;
    run_rows(first, last - first, run, std::make_integer_sequence<int, ROWS>{});
  }
}

// Call run(first column, number of columns) with a number known at compile time.
template <typename Run>
inline void for_each_columns(int64_t columns, Run run) {
  int64_t first = 0;
  for (; first + COLUMNS <= columns; first += COLUMNS)
    run(first, std::integral_constant<int, COLUMNS>{});
  for (; first < columns; ++first) run(first, std::integral_constant<int, 1>{});
}

// scores[r * score_row + t] = queries[r] . key of token t, for all tokens of the tiles. `tiles`
// holds AHEAD more than `num_tiles`.
template <typename Format>
void multiply_keys(const typename Format::Operand* queries, int64_t rows, int64_t width,
                   const typename Format::Stored* const* tiles, int64_t num_tiles, float* scores,
                   int64_t score_row) {
  constexpr int64_t PER_TILE = TILE / LANES;
  for_each_columns(num_tiles * PER_TILE, [&](int64_t column, auto num_columns) {
    constexpr int C = decltype(num_columns)::value;
    Columns<Format, C> columns;
    for (int c = 0; c < C; ++c) {
      const int64_t tile = (column + c) / PER_TILE;
      const int64_t offset = (column + c) % PER_TILE * LANES * Format::PAIR;
      columns.now[c] = tiles[tile] + offset;
      columns.ahead[c] = tiles[tile + AHEAD] + offset;
    }
    for_each_rows(rows, [&](int64_t row, auto num_rows) {
      constexpr int R = decltype(num_rows)::value;
      Vector sums[R][C] = {};
      accumulate<Format, R, C>(sums, queries + row * width, width, columns, TILE * Format::PAIR,
                               width / Format::PAIR, row == 0);
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
          store(scores + (row + r) * score_row + (column + c) * LANES, sums[r][c]);
    });
  });
}

// Over the tokens t of the tiles, result[r * width + d] += weights[r * weight_row + t] * V[t][d].
// `tiles` holds AHEAD more than `num_tiles`.
template <typename Format>
void add_values(const typename Format::Operand* weights, int64_t rows, int64_t weight_row,
                const typename Format::Stored* const* tiles, int64_t num_tiles, float* result,
                int64_t width) {
  for_each_columns(width / LANES, [&](int64_t column, auto num_columns) {
    constexpr int C = decltype(num_columns)::value;
    for_each_rows(rows, [&](int64_t row, auto num_rows) {
      constexpr int R = decltype(num_rows)::value;
      float* mine = result + row * width + column * LANES;
      Vector sums[R][C];
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) sums[r][c] = load(mine + r * width + c * LANES);
      for (int64_t tile = 0; tile < num_tiles; ++tile) {
        Columns<Format, C> columns;
        for (int c = 0; c < C; ++c) {
          columns.now[c] = tiles[tile] + (column + c) * LANES * Format::PAIR;
          columns.ahead[c] = tiles[tile + AHEAD] + (column + c) * LANES * Format::PAIR;
        }
        accumulate<Format, R, C>(sums, weights + row * weight_row + tile * TILE, weight_row,
                                 columns, width * Format::PAIR, TILE / Format::PAIR, row == 0);
      }
      for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c) store(mine + r * width + c * LANES, sums[r][c]);
    });
  });
}

}  // namespace pageloom
