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
  bool sinks;
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

// Steps of prompts, chunks and decodes; slots not yet written hold NaN. Returns the largest error.
template <typename T>
double largest_error(const Case& c, int64_t dtype) {
  const std::vector<std::vector<int64_t>> steps = {
      {70, 300, 1}, {1, 1, 33}, {16, 1, 1}, {1, 250, 1}, {1, 1, 1}};  // new tokens per sequence
  const int64_t sequences = 3, most = 700, width = (most + c.block_size - 1) / c.block_size;
  const int64_t vector = (c.head_size + 15) / 16 * 16;
  std::vector<uint16_t> cache(
      sequences * width * c.kv_heads * 2 * c.block_size * vector * sizeof(T) / 2, 0x7fff);
  Layer layer{reinterpret_cast<char*>(cache.data()), dtype, c.heads, c.kv_heads, c.head_size,
              c.block_size, c.window, 1 / std::sqrt(float(c.head_size)), c.softcap};
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
    Batch batch{sequences, tokens, starts.data(), seq_lens.data(), rows.data(), width,
                slots.data()};
    const int64_t strides[] = {all, kv, kv, all};
    pageloom_forward(&layer, &batch, q.data(), k.data(), v.data(), out.data(), strides,
                     c.sinks ? sinks.data() : nullptr);
    const std::vector<double> queries = exact(q), got = exact(out);
    const std::vector<double> k_now = exact(k), v_now = exact(v);
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

int main() {
  const Case cases[] = {
      {9, 3, 64, 16, 0, 0, false}, {4, 2, 80, 16, 20, 0, true},  {2, 1, 33, 3, 0, 3, true},
      {8, 1, 128, 48, 0, 0, false}, {5, 5, 8, 1, 17, 2, false}, {3, 1, 96, 24, 300, 0, false},
  };
  bool good = true;
  for (const Case& c : cases) {
    const double errors[] = {largest_error<float>(c, 0), largest_error<bfloat16>(c, 1),
                             largest_error<float16>(c, 2)};
    const double tolerances[] = {1e-5, 2e-2, 3e-3};
    for (int i = 0; i < 3; ++i) {
      std::printf("%ld/%ld x %ld dtype %d: %.1e\n", long(c.heads), long(c.kv_heads),
                  long(c.head_size), i, errors[i]);
      good = good && errors[i] <= tolerances[i];
    }
  }
  return good ? 0 : 1;
}
