// Paged attention for decodes on a CPU, and the store of new K and V.
//
// The cache of a layer is two arrays, K and V, in which the vector of head h in slot o of block b
// is row (b * kv_heads + h) * block_size + o. Everything is computed in float32.
//
// A task is one KV head of one sequence over at most SPLIT tokens. It reads each K and V row once
// for all query heads of the group: first the scores of the whole split, then their exponentials,
// then the weighted sum of V. A long sequence has several tasks, which are merged in order (Dao et
// al. 2023, "Flash-Decoding"). Splits have a fixed length, so the result of a sequence is the same
// to the bit whatever else is in the batch and however many threads there are.
//
// Vectors are the 16-lane type that GCC and Clang lower to what the CPU has: one AVX-512 register,
// two of AVX2, four of NEON. The usual head sizes are known at compile time (D); others take the
// same code with D = 0.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace {

constexpr int64_t SPLIT = 512;  // tokens
constexpr int TILE = 4;         // tokens whose arithmetic is interleaved
constexpr int LANES = 16;
constexpr int MAX_CHUNKS = 512 / LANES;  // of the largest head size
constexpr float NEGATIVE_INFINITY = -std::numeric_limits<float>::infinity();

template <typename T, int N>
struct VectorOf {
  typedef T type __attribute__((vector_size(N * sizeof(T))));
};
using Vector = VectorOf<float, LANES>::type;

struct bfloat16 {
  uint16_t bits;
};

inline Vector load(const float* x) {
  Vector result;
  std::memcpy(&result, x, sizeof result);
  return result;
}

inline Vector load(const bfloat16* x) {
  VectorOf<uint16_t, LANES>::type bits;
  std::memcpy(&bits, x, sizeof bits);
  auto wide = __builtin_convertvector(bits, VectorOf<uint32_t, LANES>::type) << 16;
  return reinterpret_cast<Vector>(wide);
}

// Lanes `chunk * LANES` and on of a row of `size` elements; lanes past its end are 0.
template <typename T>
inline Vector load_chunk(const T* row, int chunk, int size) {
  int left = size - chunk * LANES;
  if (left >= LANES) return load(row + chunk * LANES);
  T padded[LANES] = {};
  std::memcpy(padded, row + chunk * LANES, left * sizeof(T));
  return load(padded);
}

template <int N>
inline float sum(typename VectorOf<float, N>::type x) {
  if constexpr (N == 1) {
    return x[0];
  } else {
    typename VectorOf<float, N / 2>::type low, high;
    std::memcpy(&low, &x, sizeof low);
    std::memcpy(&high, reinterpret_cast<const char*>(&x) + sizeof low, sizeof high);
    return sum<N / 2>(low + high);
  }
}

inline void narrow(float x, float* result) { *result = x; }

// Round to nearest even. NaN stays NaN.
inline void narrow(float x, bfloat16* result) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  result->bits = static_cast<uint16_t>(is_nan ? 0x7fc0u : rounded);
}

// e^x for x <= 0, within 2 units in the last place: 2^n times a polynomial on [-ln2/2, ln2/2].
// Branch-free, so that a loop over it vectorises.
inline float exponential(float x) {
  x = std::max(x, -87.0f);
  float n = std::nearbyintf(x * 1.44269504f);
  float r = x - n * 0.693145752f - n * 1.42860677e-6f;
  float p = 1.98756915e-4f;
  p = p * r + 1.39819994e-3f;
  p = p * r + 8.33345185e-3f;
  p = p * r + 4.16657962e-2f;
  p = p * r + 1.66666654e-1f;
  p = p * r + 0.5f;
  p = p * r * r + r + 1.0f;
  int32_t bits;
  std::memcpy(&bits, &p, sizeof bits);
  bits += static_cast<int32_t>(n) << 23;
  std::memcpy(&p, &bits, sizeof p);
  return p;
}

struct Shape {
  int64_t heads, kv_heads, head_size, block_size;
  int64_t window;  // tokens, 0 for none
  float scale, softcap;  // softcap 0 for none
};

struct Task {
  int64_t sequence, kv_head, begin, end, split, splits;
};

// A split's result for one query head: the largest score, the sum of the exponentials, and the
// unnormalised output in `partial`.
struct Sums {
  float largest, total;
};

// Call `visit(i, rows, n)` for tiles of n <= TILE tokens from token i of the task on; the vectors of
// the tile begin at elements rows[0 .. n - 1], and the rest of `rows` repeats the first.
template <typename Visit>
inline void for_each_tile(const Task& task, const int32_t* table, const Shape& shape, int size,
                          Visit visit) {
  int64_t rows[TILE];
  int filled = 0;
  int64_t block = task.begin / shape.block_size, offset = task.begin % shape.block_size;
  const int64_t count = task.end - task.begin;
  for (int64_t i = 0; i < count; ++block, offset = 0) {
    int64_t first = (table[block] * shape.kv_heads + task.kv_head) * shape.block_size;
    for (; offset < shape.block_size && i < count; ++offset) {
      rows[filled++] = (first + offset) * size;
      ++i;
      if (filled == TILE || i == count) {
        std::fill(rows + filled, rows + TILE, rows[0]);
        visit(i - filled, rows, filled);
        filled = 0;
      }
    }
  }
}

template <typename T, int D>
void attend_split(const Task& task, const T* q, const T* keys, const T* values,
                  const int32_t* table, const Shape& shape, Sums* sums, Vector* partial) {
  const int size = D ? D : shape.head_size;
  const int chunks = (size + LANES - 1) / LANES;
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t count = task.end - task.begin;
  thread_local std::vector<Vector> queries;
  thread_local std::vector<float> scores;
  queries.resize(group * chunks);
  scores.resize(group * SPLIT);
  for (int64_t g = 0; g < group; ++g)
    for (int c = 0; c < chunks; ++c)
      queries[g * chunks + c] = load_chunk(q + g * size, c, size) * shape.scale;

  for_each_tile(task, table, shape, size, [&](int64_t i, const int64_t* rows, int n) {
    Vector wide[TILE][D ? D / LANES : MAX_CHUNKS];
    for (int t = 0; t < TILE; ++t)
      for (int c = 0; c < chunks; ++c) wide[t][c] = load_chunk(keys + rows[t], c, size);
    for (int64_t g = 0; g < group; ++g) {
      const Vector* query = &queries[g * chunks];
      Vector products[TILE] = {};
      for (int c = 0; c < chunks; ++c)
        for (int t = 0; t < TILE; ++t) products[t] += query[c] * wide[t][c];
      for (int t = 0; t < n; ++t) scores[g * SPLIT + i + t] = sum<LANES>(products[t]);
    }
  });

  for (int64_t g = 0; g < group; ++g) {
    float* mine = &scores[g * SPLIT];
    if (shape.softcap > 0)
      for (int64_t i = 0; i < count; ++i)
        mine[i] = shape.softcap * std::tanh(mine[i] / shape.softcap);
    float largest = NEGATIVE_INFINITY, total = 0;
#pragma omp simd reduction(max : largest)
    for (int64_t i = 0; i < count; ++i) largest = std::max(largest, mine[i]);
#pragma omp simd reduction(+ : total)
    for (int64_t i = 0; i < count; ++i) total += mine[i] = exponential(mine[i] - largest);
    sums[g] = {largest, total};
  }

  std::fill(partial, partial + group * chunks, Vector{});
  for_each_tile(task, table, shape, size, [&](int64_t i, const int64_t* rows, int n) {
    Vector wide[TILE][D ? D / LANES : MAX_CHUNKS];
    for (int t = 0; t < n; ++t)
      for (int c = 0; c < chunks; ++c) wide[t][c] = load_chunk(values + rows[t], c, size);
    for (int64_t g = 0; g < group; ++g) {
      const float* weights = &scores[g * SPLIT + i];
      Vector* output = &partial[g * chunks];
      for (int c = 0; c < chunks; ++c) {
        Vector sum = output[c];
        for (int t = 0; t < n; ++t) sum += weights[t] * wide[t][c];
        output[c] = sum;
      }
    }
  });
}

// Merge the splits of one query head and write its output.
template <typename T>
void merge(const Sums* sums, const Vector* partial, int64_t splits, int64_t group, int size,
           const float* sink, T* out) {
  const int chunks = (size + LANES - 1) / LANES;
  float largest = sink ? *sink : NEGATIVE_INFINITY;
  for (int64_t s = 0; s < splits; ++s) largest = std::max(largest, sums[s * group].largest);
  float total = sink ? std::exp(*sink - largest) : 0.0f;
  Vector result[MAX_CHUNKS] = {};
  for (int64_t s = 0; s < splits; ++s) {
    float weight = std::exp(sums[s * group].largest - largest);
    total += weight * sums[s * group].total;
    for (int c = 0; c < chunks; ++c) result[c] += weight * partial[s * group * chunks + c];
  }
  for (int d = 0; d < size; ++d) narrow(result[d / LANES][d % LANES] / total, out + d);
}

template <typename T, int D>
void decode(const T* q, int64_t q_stride, T* out, int64_t out_stride, const T* keys,
            const T* values, const int32_t* tables, int64_t table_stride, const int32_t* lengths,
            int64_t sequences, const Shape& shape, const float* sinks) {
  const int64_t size = D ? D : shape.head_size, chunks = (size + LANES - 1) / LANES;
  const int64_t group = shape.heads / shape.kv_heads;
  std::vector<Task> tasks;
  for (int64_t b = 0; b < sequences; ++b) {
    int64_t first = shape.window ? std::max<int64_t>(0, lengths[b] - shape.window) : 0;
    // Splits begin at multiples of SPLIT, so that a growing sequence keeps its splits.
    int64_t splits = (lengths[b] - 1) / SPLIT - first / SPLIT + 1;
    for (int64_t h = 0; h < shape.kv_heads; ++h)
      for (int64_t s = 0; s < splits; ++s) {
        int64_t begin = (first / SPLIT + s) * SPLIT;
        tasks.push_back({b, h, std::max(first, begin),
                         std::min<int64_t>(lengths[b], begin + SPLIT), s, splits});
      }
  }
  std::vector<Sums> sums(tasks.size() * group);
  std::vector<Vector> partial(tasks.size() * group * chunks);
  const int64_t count = tasks.size();

#pragma omp parallel
  {
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < count; ++i) {
      const Task& task = tasks[i];
      attend_split<T, D>(task, q + task.sequence * q_stride + task.kv_head * group * size, keys,
                         values, tables + task.sequence * table_stride, shape, &sums[i * group],
                         &partial[i * group * chunks]);
    }
#pragma omp for
    for (int64_t i = 0; i < count; ++i) {
      const Task& task = tasks[i];
      if (task.split) continue;  // the first split merges all of its sequence and head
      for (int64_t g = 0; g < group; ++g) {
        int64_t head = task.kv_head * group + g;
        merge<T>(&sums[i * group + g], &partial[(i * group + g) * chunks], task.splits, group,
                 size, sinks ? sinks + head : nullptr,
                 out + task.sequence * out_stride + head * size);
      }
    }
  }
}

template <typename T>
void decode_by_head_size(const T* q, int64_t q_stride, T* out, int64_t out_stride, const T* keys,
                         const T* values, const int32_t* tables, int64_t table_stride,
                         const int32_t* lengths, int64_t sequences, const Shape& shape,
                         const float* sinks) {
  auto run = [&](auto kernel) {
    kernel(q, q_stride, out, out_stride, keys, values, tables, table_stride, lengths, sequences,
           shape, sinks);
  };
  switch (shape.head_size) {
    case 64: return run(decode<T, 64>);
    case 80: return run(decode<T, 80>);
    case 96: return run(decode<T, 96>);
    case 128: return run(decode<T, 128>);
    case 256: return run(decode<T, 256>);
    default: return run(decode<T, 0>);
  }
}

}  // namespace

extern "C" {

// Attend with one query token per sequence. q, out: [sequences, heads, head_size], rows strided by
// so many elements. head_size is at most MAX_CHUNKS * LANES.
void pageloom_decode(bool is_bfloat16, const void* q, int64_t q_stride, void* out,
                     int64_t out_stride, const void* keys, const void* values,
                     const int32_t* tables, int64_t table_stride, const int32_t* lengths,
                     int64_t sequences, int64_t heads, int64_t kv_heads, int64_t head_size,
                     int64_t block_size, int64_t window, float scale, float softcap,
                     const float* sinks) {
  Shape shape{heads, kv_heads, head_size, block_size, window, scale, softcap};
  if (is_bfloat16) {
    using T = bfloat16;
    decode_by_head_size<T>(static_cast<const T*>(q), q_stride, static_cast<T*>(out),
                           out_stride, static_cast<const T*>(keys), static_cast<const T*>(values),
                           tables, table_stride, lengths, sequences, shape, sinks);
    return;
  }
  using T = float;
  decode_by_head_size<T>(static_cast<const T*>(q), q_stride, static_cast<T*>(out),
                         out_stride, static_cast<const T*>(keys), static_cast<const T*>(values),
                         tables, table_stride, lengths, sequences, shape, sinks);
}

// Put the K and V of each token, [tokens, kv_heads, row_bytes], into its slot.
void pageloom_store(const char* k, const char* v, int64_t k_stride, int64_t v_stride, char* keys,
                    char* values, const int64_t* slots, int64_t tokens, int64_t kv_heads,
                    int64_t block_size, int64_t row_bytes) {
#pragma omp parallel for if (tokens >= 256)
  for (int64_t t = 0; t < tokens; ++t) {
    int64_t block = slots[t] / block_size, offset = slots[t] % block_size;
    for (int64_t h = 0; h < kv_heads; ++h) {
      int64_t to = ((block * kv_heads + h) * block_size + offset) * row_bytes;
      std::memcpy(keys + to, k + t * k_stride + h * row_bytes, row_bytes);
      std::memcpy(values + to, v + t * v_stride + h * row_bytes, row_bytes);
    }
  }
}
}
