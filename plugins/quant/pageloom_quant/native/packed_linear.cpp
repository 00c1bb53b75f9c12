// Linear layers on a CPU whose weights stay packed.
//
// A weight is cut into panels of PANEL outputs, which threads share out. Codes are widened in
// registers, STEP inputs at a time: their products with the activations are summed as they are, then
// scaled and added to the result in float32. An output depends on its own row alone, so results are
// the same to the bit whatever other rows there are and however many threads run.

#include <algorithm>
#include <cstdint>
#include <vector>

#include "codes.h"
#include "vectors.h"

namespace pageloom {

constexpr int64_t PANEL = 32;  // outputs
constexpr int64_t PARALLEL_STEPS = 4096;

// A tile is ROWS activations by COLUMNS vectors of outputs, whose sums fit into the registers.
#if defined(__AVX512F__)
constexpr int ROWS = 8, COLUMNS = 2;
#elif defined(__aarch64__)
constexpr int ROWS = 4, COLUMNS = 4;
#else
constexpr int ROWS = 4, COLUMNS = 2;
#endif

// With so many activations, codes are widened once for all tiles, WIDE_STEPS at a time.
constexpr int64_t WIDE_ROWS = 4 * ROWS;
template <typename Math>
constexpr int64_t WIDE_STEPS = 4 * Math::INPUTS;

// Read by ctypes: see packed/cpu.py. Of each panel: codes [in * bits / 32, PANEL] words, scales and
// offsets [in / group, PANEL]. The weight is code * scale + offset.
struct Weight {
  const uint32_t* codes;
  const void *scales, *offsets;  // offsets null where all are 0
  int64_t bits, halves;  // halves: scales and offsets are float16, not float32
  int64_t outputs, inputs, group;

  int64_t panels() const { return (outputs + PANEL - 1) / PANEL; }
  int64_t groups() const { return inputs / group; }
  int64_t steps() const { return inputs / STEP; }
};

// Activations [rows, inputs]; `sums [rows, steps]` of STEP inputs each, or null.
template <typename T>
struct Activations {
  const T* x;
  const float* sums;
  int64_t rows;
};

// The codes of a panel, widened whenever they are asked for.
template <int BITS, typename Math>
struct Packed {
  static constexpr int WORDS = STEP_WORDS<BITS>, PARTS = WORD_INPUTS<BITS> / Math::INPUTS;
  const uint32_t* words;

  typename Math::Codes get(int64_t step, int word, int part, int column) const {
    const uint32_t* from = words + (step * WORDS + word) * PANEL + column * LANES;
    return Math::template unpack<BITS>(load_as<Words>(from), part);
  }
};

// The same after they were widened, to [inputs / INPUTS, PANEL / LANES] vectors.
template <int BITS, typename Math>
struct Widened {
  static constexpr int WORDS = STEP_WORDS<BITS>, PARTS = WORD_INPUTS<BITS> / Math::INPUTS;
  typename Math::Codes* codes;

  typename Math::Codes& at(int64_t step, int word, int part, int column) const {
    return codes[((step * WORDS + word) * PARTS + part) * (PANEL / LANES) + column];
  }
  typename Math::Codes get(int64_t step, int word, int part, int column) const {
    return at(step, word, part, column);
  }
  void fill(const Packed<BITS, Math>& from, int64_t steps) const {
    for (int64_t step = 0; step < steps; ++step)
      for (int word = 0; word < WORDS; ++word)
#pragma GCC unroll 8
        for (int part = 0; part < PARTS; ++part)
          for (int column = 0; column < PANEL / LANES; ++column)
            at(step, word, part, column) = from.get(step, word, part, column);
  }
};

// Steps begin <= step < end of one panel; `codes` count from begin.
template <typename Codes, typename Scale>
struct Range {
  Codes codes;
  const Scale *scales, *offsets;  // of the panel
  int64_t begin, end;
};

// Add to `totals` what one tile yields, rows `PANEL` apart.
template <typename Math, int R, typename Codes, typename Scale>
void multiply_tile(const Weight& weight, const Range<Codes, Scale>& range, int column,
                   const Activations<typename Math::Activation>& in, int64_t row, float* totals) {
  const int64_t group_steps = weight.group / STEP, steps = weight.steps(), inputs = weight.inputs;
  float* mine = totals + row * PANEL + column * LANES;
  Vector result[R][COLUMNS];
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLUMNS; ++c) result[r][c] = load(mine + r * PANEL + c * LANES);
  for (int64_t step = range.begin; step < range.end; ++step) {
    Vector sums[R][COLUMNS] = {};
    const auto* x = in.x + row * inputs + step * STEP;
    for (int word = 0; word < Codes::WORDS; ++word) {
#pragma GCC unroll 8
      for (int part = 0; part < Codes::PARTS; ++part) {
        typename Math::Codes codes[COLUMNS];
        for (int c = 0; c < COLUMNS; ++c)
          codes[c] = range.codes.get(step - range.begin, word, part, column + c);
        const auto* here = x + (word * Codes::PARTS + part) * Math::INPUTS;
        for (int r = 0; r < R; ++r)
          for (int c = 0; c < COLUMNS; ++c)
            sums[r][c] = Math::multiply_add(sums[r][c], codes[c], here + r * inputs);
      }
    }
    const int64_t group = step / group_steps * PANEL + column * LANES;
    for (int c = 0; c < COLUMNS; ++c) {
      const Vector scale = load(range.scales + group + c * LANES);
      for (int r = 0; r < R; ++r) result[r][c] += sums[r][c] * scale;
    }
    if (range.offsets)
      for (int c = 0; c < COLUMNS; ++c) {
        const Vector offset = load(range.offsets + group + c * LANES);
        for (int r = 0; r < R; ++r) result[r][c] += in.sums[(row + r) * steps + step] * offset;
      }
  }
  for (int r = 0; r < R; ++r)
    for (int c = 0; c < COLUMNS; ++c) store(mine + r * PANEL + c * LANES, result[r][c]);
}

template <typename Math, int R = ROWS, typename Codes, typename Scale>
void multiply_rows(const Weight& weight, const Range<Codes, Scale>& range,
                   const Activations<typename Math::Activation>& in, int64_t row, float* totals) {
  for (; in.rows - row >= R; row += R)
    for (int column = 0; column < PANEL / LANES; column += COLUMNS)
      multiply_tile<Math, R>(weight, range, column, in, row, totals);
  if constexpr (R > 1)
    if (row < in.rows) multiply_rows<Math, R / 2>(weight, range, in, row, totals);
}

template <typename T>
void finish_panel(const Weight& weight, int64_t panel, int64_t rows, const float* totals,
                  const T* bias, T* out) {
  for (int64_t column = 0; column < PANEL; column += LANES) {
    const int64_t output = panel * PANEL + column, count = weight.outputs - output;
    if (count <= 0) return;
    const Vector shift = bias ? load_part(bias + output, count) : Vector{};
    for (int64_t row = 0; row < rows; ++row)
      store_part(out + row * weight.outputs + output, load(totals + row * PANEL + column) + shift,
                 count);
  }
}

template <int BITS, typename Scale, typename Math, typename T>
void multiply_panel(const Weight& weight, int64_t panel,
                    const Activations<typename Math::Activation>& in, const T* bias, T* out) {
  thread_local std::vector<float> totals;
  totals.assign(in.rows * PANEL, 0.0f);
  const int64_t steps = weight.steps(), first = panel * weight.groups() * PANEL;
  const Scale* scales = static_cast<const Scale*>(weight.scales) + first;
  const Scale* offsets =
      weight.offsets ? static_cast<const Scale*>(weight.offsets) + first : nullptr;
  const uint32_t* words = weight.codes + panel * steps * STEP_WORDS<BITS> * PANEL;
  if (in.rows < WIDE_ROWS) {
    const Range<Packed<BITS, Math>, Scale> range{{words}, scales, offsets, 0, steps};
    multiply_rows<Math>(weight, range, in, 0, totals.data());
  } else {
    typename Math::Codes buffer[WIDE_STEPS<Math> * STEP / Math::INPUTS * PANEL / LANES];
    const Widened<BITS, Math> codes{buffer};
    for (int64_t begin = 0; begin < steps; begin += WIDE_STEPS<Math>) {
      const int64_t end = std::min(steps, begin + WIDE_STEPS<Math>);
      codes.fill({words + begin * STEP_WORDS<BITS> * PANEL}, end - begin);
      const Range<Widened<BITS, Math>, Scale> range{codes, scales, offsets, begin, end};
      multiply_rows<Math>(weight, range, in, 0, totals.data());
    }
  }
  finish_panel(weight, panel, in.rows, totals.data(), bias, out);
}

template <typename T>
inline float sum_step(const T* x) {
  Vector sum = {};
  for (int64_t i = 0; i < STEP; i += LANES) sum += load(x + i);
  float lanes[LANES], total = 0;
  store(lanes, sum);
  for (float lane : lanes) total += lane;
  return total;
}

template <int BITS, typename Scale, typename Math, typename T>
void multiply(const Weight& weight, const T* x, int64_t rows, const T* bias, T* out) {
  using A = typename Math::Activation;
  constexpr bool widens = sizeof(A) != sizeof(T);
  const int64_t steps = weight.steps() * rows, panels = weight.panels();
  // Kept from call to call. The threads of the team reach the caller's through these pointers.
  thread_local std::vector<float> kept_sums, kept_activations;
  if (weight.offsets && int64_t(kept_sums.size()) < steps) kept_sums.resize(steps);
  if (widens && int64_t(kept_activations.size()) < steps * STEP)
    kept_activations.resize(steps * STEP);
  float *sums = weight.offsets ? kept_sums.data() : nullptr, *wide = kept_activations.data();
  const A* activations;
  if constexpr (widens) activations = wide; else activations = x;
  const Activations<A> in{activations, sums, rows};

  if (widens || sums) {
    // Alone for few rows: waiting for other threads would take longer.
#pragma omp parallel for if (steps >= PARALLEL_STEPS)
    for (int64_t step = 0; step < steps; ++step) {
      const T* from = x + step * STEP;
      if (sums) sums[step] = sum_step(from);
      if (widens)
        for (int64_t i = 0; i < STEP; i += LANES) store(wide + step * STEP + i, load(from + i));
    }
  }
#pragma omp parallel for
  for (int64_t panel = 0; panel < panels; ++panel)
    multiply_panel<BITS, Scale, Math>(weight, panel, in, bias, out);
}

template <typename Math, typename T>
void multiply(const Weight& weight, const void* x, int64_t rows, const void* bias, void* out) {
  const T *from = static_cast<const T*>(x), *shift = static_cast<const T*>(bias);
  T* to = static_cast<T*>(out);
  if (weight.bits == 4 && weight.halves)
    return multiply<4, float16, Math>(weight, from, rows, shift, to);
  if (weight.bits == 4) return multiply<4, float, Math>(weight, from, rows, shift, to);
  if (weight.halves) return multiply<8, float16, Math>(weight, from, rows, shift, to);
  return multiply<8, float, Math>(weight, from, rows, shift, to);
}

// The weights of panels begin to end, rounded to T: out [inputs, PANEL (end - begin)].
template <int BITS, typename Scale, typename T>
void expand(const Weight& weight, int64_t begin, int64_t end, T* out) {
  const int64_t steps = weight.steps(), groups = weight.groups(), width = (end - begin) * PANEL;
  const int64_t words = steps * STEP_WORDS<BITS>, group_words = words / groups;
#pragma omp parallel for
  for (int64_t panel = begin; panel < end; ++panel)
    for (int64_t word = 0; word < words; ++word)
      for (int64_t column = 0; column < PANEL; column += LANES) {
        const Words packed = load_as<Words>(weight.codes + (panel * words + word) * PANEL + column);
        const int64_t group = (panel * groups + word / group_words) * PANEL + column;
        const Vector scale = load(static_cast<const Scale*>(weight.scales) + group);
        Vector offset = {};
        if (weight.offsets) offset = load(static_cast<const Scale*>(weight.offsets) + group);
        for (int k = 0; k < WORD_INPUTS<BITS>; ++k)
          store(out + (word * WORD_INPUTS<BITS> + k) * width + (panel - begin) * PANEL + column,
                code<BITS>(packed, k) * scale + offset);
      }
}

template <typename T>
void expand(const Weight& weight, int64_t begin, int64_t end, void* out) {
  T* to = static_cast<T*>(out);
  if (weight.bits == 4 && weight.halves) return expand<4, float16>(weight, begin, end, to);
  if (weight.bits == 4) return expand<4, float>(weight, begin, end, to);
  if (weight.halves) return expand<8, float16>(weight, begin, end, to);
  return expand<8, float>(weight, begin, end, to);
}

}  // namespace pageloom

// out [rows, outputs] = x [rows, inputs] W^T + bias, contiguous. `dtype` of x, bias (or null) and
// out: 0 float32, 1 bfloat16, 2 float16.
extern "C" void pageloom_packed_linear(const pageloom::Weight* weight, int64_t dtype, const void* x,
                                       int64_t rows, const void* bias, void* out) {
  using namespace pageloom;
  switch (dtype) {
    case 0: return multiply<Plain, float>(*weight, x, rows, bias, out);
    case 1: return multiply<ForBFloat16, bfloat16>(*weight, x, rows, bias, out);
    case 2: return multiply<Plain, float16>(*weight, x, rows, bias, out);
  }
}

// out [inputs, PANEL (end - begin)] of `dtype`: the weights of these panels.
extern "C" void pageloom_packed_expand(const pageloom::Weight* weight, int64_t dtype, int64_t begin,
                                       int64_t end, void* out) {
  using namespace pageloom;
  switch (dtype) {
    case 0: return expand<float>(*weight, begin, end, out);
    case 1: return expand<bfloat16>(*weight, begin, end, out);
    case 2: return expand<float16>(*weight, begin, end, out);
  }
}
