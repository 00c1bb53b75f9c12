// The native kernels against attention by its definition, with no Python, so that it runs under an
// emulator of another CPU and under sanitizers. Prints the largest error of each case.

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <random>
#include <vector>

#include "cpu_paged.cpp"

using namespace pageloom;

struct Case {
  int64_t heads, kv_heads, head_size, block_size, window;
  float softcap;
  bool sinks, rotary = false;
};

struct Coded {
  int64_t element, scale_per_vector;  // as in Layer
  float k_scale, v_scale;
};

std::mt19937 generator(7);

template <typename T>
void fill(std::vector<T>& to) {
  std::normal_distribution<float> normal;
  for (size_t i = 0; i < to.size(); i += LANES) {
    float values[LANES];
    for (float& value : values) value = normal(generator);
    store_part(&to[i], load(values), to.size() - i);
  }
}

template <typename T>
std::vector<double> exact(const std::vector<T>& x) {
  std::vector<double> result;
  for (size_t i = 0; i < x.size(); i += LANES) {
    const Vector values = load_part(&x[i], x.size() - i);
    for (size_t lane = 0; lane < LANES && i + lane < x.size(); ++lane)
      result.push_back(values[lane]);
  }
  return result;
}

// The numbers of codes 0 to 126, or to 123, of eight bits: IEEE's rule.
std::vector<double> minifloats(int mantissa, int bias, int count) {
  std::vector<double> result;
  for (int code = 0; code < count; ++code) {
    const int exponent = code >> mantissa, steps = 1 << mantissa, low = code % steps;
    result.push_back(exponent ? std::ldexp(1 + double(low) / steps, exponent - bias)
                              : std::ldexp(double(low) / steps, 1 - bias));
  }
  return result;
}

// The nearest of `values`, of two the one of even index, with the sign of x; the last if x is
// larger.
double nearest(double x, const std::vector<double>& values) {
  const double size = std::fabs(x);
  const size_t above = std::lower_bound(values.begin(), values.end(), size) - values.begin();
  if (above == 0) return x;
  if (above == values.size()) return std::copysign(values.back(), x);
  const double down = size - values[above - 1], up = values[above] - size;
  const bool is_up = up < down || (up == down && above % 2 == 0);
  return std::copysign(values[is_up ? above : above - 1], x);
}

// Of 16 scales in the octave from `least` on, the one with which fp8 comes nearest to a vector.
float fitted(const std::vector<double>& values, float least, const double* x, int64_t count) {
  const double limit = values.back(), step = limit - values.end()[-2];
  float scale = least, best = INFINITY;
  for (int i = 0; i < 16; ++i) {
    const float candidate = least * float(std::exp2(i / 16.0)), inverse = 1 / candidate;
    int64_t squares = 0;
    for (int64_t d = 0; d < count; ++d) {
      const double scaled = std::clamp<double>(float(float(x[d]) * inverse), -limit, limit);
      const int64_t error = std::lrint((nearest(scaled, values) - scaled) / (step / 256));
      squares += error * error;
    }
    const float error = float(squares) * float(std::exp2(i / 8.0));
    if (error < best) best = error, scale = candidate;
  }
  return scale;
}

// What is read back of a vector, as `VectorLayout` of pageloom.contract has it.
void round_through(const Coded& c, float scale, double* x, int64_t count) {
  static const std::vector<double> e4m3 = minifloats(3, 7, 127), e5m2 = minifloats(2, 15, 124);
  const auto [low, high] = std::minmax_element(x, x + count);
  const float least = float(*low), most = float(*high);
  if (c.element == 4 && c.scale_per_vector) {
    uint8_t unused[2];
    const float bias = round_to_float16(least, unused);
    const float step = round_to_float16((most - bias) / 15, unused), inverse = 1 / step;
    for (int64_t i = 0; i < count; ++i) {
      const float code = (float(x[i]) - bias) * inverse;
      x[i] = std::nearbyint(std::clamp(code, 0.0f, 15.0f)) * double(step) + bias;
    }
    return;
  }
  const float limit = c.element == 1 ? 448 : c.element == 2 ? 57344 : c.element == 3 ? 127 : 7;
  if (c.scale_per_vector) scale = std::max(-least, most) / limit;
  if (c.scale_per_vector && c.element < 3)
    scale = fitted(c.element == 1 ? e4m3 : e5m2, scale, x, count);
  const float inverse = 1 / scale;
  for (int64_t i = 0; i < count; ++i) {
    const float scaled = float(x[i]) * inverse;
    const double code = c.element == 1   ? nearest(scaled, e4m3)
                        : c.element == 2 ? nearest(scaled, e5m2)
                                         : std::nearbyint(std::clamp(scaled, -limit, limit));
    x[i] = code * scale;
  }
}

// Put some numbers half way between two codes, as near as their type allows.
template <typename T>
void make_ties(std::vector<T>& x, float scale) {
  for (size_t i = 0; i + LANES <= x.size(); i += 3 * LANES) {
    float values[LANES];
    for (int lane = 0; lane < LANES; ++lane) values[lane] = (int(generator() % 12) - 5.5f) * scale;
    store(&x[i], load(values));
  }
}

// Cosines and signed sines of `count` turns of each pair of `size` elements: by quarters of a circle,
// which is exact, or by any angle.
template <typename T>
struct Turns {
  Turns(int64_t count, int64_t size, bool quarters) : size(size), cos(count * size), sin(cos) {
    std::uniform_real_distribution<double> angles(0, 6.28);
    for (int64_t i = 0; i < count * size; i += size)
      for (int64_t d = 0; d < size / 2; ++d) {
        const int quarter = generator() % 4;
        const double angle = angles(generator);
        const float c = quarters ? (quarter == 0) - (quarter == 2) : std::cos(angle);
        const float s = quarters ? (quarter == 1) - (quarter == 3) : std::sin(angle);
        store_part(&cos[i + d], spread(c), 1), store_part(&cos[i + size / 2 + d], spread(c), 1);
        store_part(&sin[i + d], spread(-s), 1), store_part(&sin[i + size / 2 + d], spread(s), 1);
      }
  }

  // Of `heads` vectors for each turn.
  std::vector<double> turn(const std::vector<double>& x, int64_t heads) const {
    const std::vector<double> c = exact(cos), s = exact(sin);
    std::vector<double> result(x.size());
    for (int64_t i = 0; i < int64_t(x.size()); ++i) {
      const int64_t d = i % size, other = i - d + (d + size / 2) % size;
      const int64_t at = i / size / heads * size + d;
      result[i] = x[i] * c[at] + x[other] * s[at];
    }
    return result;
  }

  int64_t size;
  std::vector<T> cos, sin;
};

// Steps of prompts, chunks and decodes; slots not yet written hold NaN. Returns the largest error.
template <typename T>
double largest_error(const Case& c, int64_t dtype, const Coded& coded) {
  const std::vector<std::vector<int64_t>> steps = {
      {70, 300, 1}, {1, 1, 33}, {16, 1, 1}, {1, 250, 1}, {1, 1, 1}};  // new tokens per sequence
  const int64_t sequences = 3, most = 700, width = (most + c.block_size - 1) / c.block_size;
  const int64_t vector = (c.head_size + 15) / 16 * 16;
  const int64_t bytes = coded.element == 0   ? vector * sizeof(T)
                        : coded.element == 4 ? vector / 2 + 4 * coded.scale_per_vector
                                              : vector + 4 * coded.scale_per_vector;
  std::vector<uint16_t> cache(sequences * width * c.kv_heads * c.block_size * bytes, 0x7fff);
  Layer layer{reinterpret_cast<char*>(cache.data()),
              dtype,
              c.heads,
              c.kv_heads,
              c.head_size,
              c.block_size,
              c.window,
              1 / std::sqrt(float(c.head_size)),
              c.softcap,
              coded.element,
              coded.scale_per_vector,
              coded.k_scale,
              coded.v_scale};
  std::vector<int32_t> tables(sequences * width);
  for (size_t i = 0; i < tables.size(); ++i) tables[i] = i;
  std::shuffle(tables.begin(), tables.end(), generator);
  std::vector<float> sinks(c.heads);
  fill(sinks);
  std::vector<std::vector<double>> keys(sequences), values(sequences);
  std::vector<int64_t> lengths(sequences);
  double worst = 0;
  for (const auto& step : steps) {
    // Sequences with one new token come first in a batch.
    std::vector<int64_t> order;
    for (int64_t i = 0; i < sequences; ++i)
      if (step[i] == 1) order.push_back(i);
    for (int64_t i = 0; i < sequences; ++i)
      if (step[i] != 1) order.push_back(i);
    std::vector<int32_t> starts = {0}, seq_lens, rows;
    std::vector<int64_t> slots;
    for (int64_t i : order) {
      const int32_t* table = &tables[i * width];
      for (int64_t t = lengths[i]; t < lengths[i] + step[i]; ++t)
        slots.push_back(table[t / c.block_size] * c.block_size + t % c.block_size);
      starts.push_back(starts.back() + step[i]);
      lengths[i] += step[i];
      seq_lens.push_back(lengths[i]);
      rows.insert(rows.end(), table, table + width);
    }
    const int64_t tokens = slots.size(), kv = c.kv_heads * c.head_size, all = c.heads * c.head_size;
    std::vector<T> q(tokens * all), k(tokens * kv), v(tokens * kv), out(tokens * all);
    fill(q), fill(k), fill(v);
    if (coded.element) make_ties(k, coded.k_scale), make_ties(v, coded.v_scale);
    Batch batch{sequences, tokens, starts.data(), seq_lens.data(), rows.data(), width,
                slots.data()};
    const int64_t strides[] = {all, kv, kv, all};
    const Turns<T> turns(tokens, c.head_size, coded.element != 0);
    pageloom_forward(&layer, &batch, q.data(), k.data(), v.data(), out.data(), strides,
                     c.sinks ? sinks.data() : nullptr, c.rotary ? turns.cos.data() : nullptr,
                     c.rotary ? turns.sin.data() : nullptr);
    const std::vector<double> got = exact(out);
    std::vector<double> queries = exact(q), k_now = exact(k), v_now = exact(v);
    if (c.rotary) queries = turns.turn(queries, c.heads), k_now = turns.turn(k_now, c.kv_heads);
    if (coded.element)
      for (int64_t i = 0; i < tokens * kv; i += c.head_size) {
        round_through(coded, coded.k_scale, &k_now[i], c.head_size);
        round_through(coded, coded.v_scale, &v_now[i], c.head_size);
      }
    for (int64_t b = 0; b < sequences; ++b) {
      const int64_t i = order[b];
      keys[i].insert(keys[i].end(), &k_now[starts[b] * kv], &k_now[0] + starts[b + 1] * kv);
      values[i].insert(values[i].end(), &v_now[starts[b] * kv], &v_now[0] + starts[b + 1] * kv);
      for (int64_t row = starts[b]; row < starts[b + 1]; ++row)
        for (int64_t head = 0; head < c.heads; ++head) {
          const int64_t position = lengths[i] - starts[b + 1] + row;
          const int64_t first = c.window ? std::max<int64_t>(0, position + 1 - c.window) : 0;
          const int64_t at = row * all + head * c.head_size;
          const int64_t kv_head = head / (c.heads / c.kv_heads) * c.head_size;
          std::vector<double> expected(c.head_size);
          double total = c.sinks ? std::exp(double(sinks[head])) : 0;
          for (int64_t t = first; t <= position; ++t) {
            double score = 0;
            for (int64_t d = 0; d < c.head_size; ++d)
              score += queries[at + d] * keys[i][t * kv + kv_head + d];
            score *= layer.scale;
            if (c.softcap > 0) score = c.softcap * std::tanh(score / c.softcap);
            const double weight = std::exp(score);
            total += weight;
            for (int64_t d = 0; d < c.head_size; ++d)
              expected[d] += weight * values[i][t * kv + kv_head + d];
          }
          for (int64_t d = 0; d < c.head_size; ++d) {
            const double error = std::fabs(got[at + d] - expected[d] / total);
            if (!(error <= worst)) worst = error;  // NaN stays
          }
        }
    }
  }
  return worst;
}

// Whether all dtypes are right.
bool check(const Case& c, const Coded& coded) {
  const double errors[] = {largest_error<float>(c, 0, coded),
                           largest_error<bfloat16>(c, 1, coded),
                           largest_error<float16>(c, 2, coded)};
  const double tolerances[] = {1e-5, 2e-2, 3e-3};
  bool good = true;
  for (int i = 0; i < 3; ++i) {
    std::printf("%ld/%ld x %ld element %ld %ld dtype %d: %.1e\n", long(c.heads), long(c.kv_heads),
                long(c.head_size), long(coded.element), long(coded.scale_per_vector), i,
                errors[i]);
    good = good && errors[i] <= tolerances[i];
  }
  return good;
}

int main() {
  const Case cases[] = {
      {9, 3, 64, 16, 0, 0, false}, {4, 2, 80, 16, 20, 0, true},  {2, 1, 33, 3, 0, 3, true},
      {8, 1, 128, 48, 0, 0, false}, {5, 5, 8, 1, 17, 2, false}, {3, 1, 96, 24, 300, 0, false},
      {4, 2, 72, 16, 0, 0, false, true}, {2, 1, 10, 3, 0, 0, true, true},
  };
  const Case coded_cases[] = {{4, 2, 48, 32, 0, 0, false, true}, {2, 1, 34, 3, 20, 3, true}};
  const Coded codings[] = {
      {1, 0, 0.013f, 0.21f}, {1, 1, 0.1f, 0.1f}, {2, 0, 0.013f, 0.21f}, {2, 1, 0.1f, 0.1f},
      {3, 0, 0.023f, 0.031f}, {3, 1, 0.1f, 0.1f}, {4, 0, 0.31f, 0.45f}, {4, 1, 0.1f, 0.1f},
  };
  bool good = true;
  for (const Case& c : cases) good = check(c, {}) && good;
  for (int i = 0; i < 8; ++i) good = check(coded_cases[(i + i / 2) % 2], codings[i]) && good;
  return good ? 0 : 1;
}
