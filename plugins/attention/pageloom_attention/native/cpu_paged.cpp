// Paged attention on a CPU: one step of one layer, decodes, chunks and whole prompts in one call.
//
// A step is cut into tasks, which threads take as they become free. A task is one KV head of one
// sequence with up to QUERY_ROWS rows (query tokens times query heads of the group), over up to
// PREFILL_SPLIT or decode_split() tokens; what the splits of a range found is merged in their order
// (Dao et al. 2023, "Flash-Decoding"). How a sequence is cut depends on its own tokens alone, so
// its result is the same to the bit whatever else is in the batch and however many threads run.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "attend.h"
#include "coded.h"
#include "formats.h"
#include "layout.h"
#include "rotary.h"
#include "simd.h"
#include "tiles.h"

namespace pageloom {

constexpr int64_t QUERY_ROWS = 96;
constexpr int64_t PREFILL_SPLIT = 16 * STEP;  // tokens

// Tokens of a decode's task: the fewer KV heads there are to share out, the fewer.
inline int64_t decode_split(const Layer& layer) {
  return STEP * std::clamp<int64_t>(layer.kv_heads / 2, 2, 16);
}

// One step. Read by ctypes: see cpu_paged.py.
struct Batch {
  int64_t sequences, tokens;
  const int32_t *query_start, *seq_lens, *tables;
  int64_t table_stride;
  const int64_t* slots;
};

// Arguments of one layer; rows of q, k, v and out are tokens, strided by so many elements.
template <typename T>
struct Tensors {
  const T *q, *k, *v;
  T* out;
  int64_t q_stride, k_stride, v_stride, out_stride;
  const float* sinks;
  Rotary<T> rotary;
};

// Longest first: chunks and prompts come last in a batch, and their last tokens see most. Returns
// the number of rows that await a merge.
int64_t plan(const Layer& layer, const Batch& batch, std::vector<Task>& tasks) {
  const int64_t most = std::max<int64_t>(1, QUERY_ROWS / layer.group());
  tasks.clear();
  int64_t waiting_rows = 0;
  for (int64_t i = batch.sequences - 1; i >= 0; --i) {
    const int64_t length = batch.seq_lens[i];
    const int64_t count = batch.query_start[i + 1] - batch.query_start[i];
    const int64_t size = count == 1 ? decode_split(layer) : PREFILL_SPLIT;
    for (int64_t first = (count - 1) / most * most; first >= 0; first -= most) {
      const int64_t queries = std::min(most, count - first), position = length - count + first;
      const int64_t end = position + queries;
      const int64_t begin = layer.window ? std::max<int64_t>(0, position + 1 - layer.window) : 0;
      const int64_t first_split = begin / size, splits = (end - 1) / size - first_split + 1;
      for (int64_t head = 0; head < layer.kv_heads; ++head)
        for (int64_t s = 0; s < splits; ++s) {
          const int64_t start = (first_split + s) * size;
          tasks.push_back({i, head, first, queries, std::max(begin, start),
                           std::min(end, start + size), position, s, splits, waiting_rows});
          if (splits > 1) waiting_rows += queries * layer.group();
        }
    }
  }
  return waiting_rows;
}

// Merge what `splits` tasks found for one row, each `step` rows after the other, into the first
// result, and write it.
template <typename T>
void finish(const Layer& layer, const Sums* sums, float* results, int64_t splits, int64_t step,
            const float* sink, T* out) {
  const int64_t width = layer.width();
  float largest = sink ? *sink * LOG2_E : NEGATIVE_INFINITY;
  for (int64_t s = 0; s < splits; ++s) largest = std::max(largest, sums[s * step].largest);
  float total = sink ? std::exp2(*sink * LOG2_E - largest) : 0.0f;
  for (int64_t s = 0; s < splits; ++s)
    total += sums[s * step].total * std::exp2(sums[s * step].largest - largest);
  for (int64_t s = 0; s < splits; ++s) {
    const float factor = std::exp2(sums[s * step].largest - largest) / total;
    const float* mine = results + s * step * width;
    for (int64_t d = 0; d < width; d += LANES)
      store(results + d, s ? load(results + d) + load(mine + d) * factor : load(mine + d) * factor);
  }
  for (int64_t d = 0; d < layer.head_size; d += LANES)
    store_part(out + d, load(results + d), layer.head_size - d);
}

template <typename T>
void finish_rows(const Layer& layer, const Batch& batch, const Tensors<T>& x, const Task& task,
                 const Sums* sums, float* results) {
  const int64_t group = layer.group(), rows = task.queries * group;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t head = task.kv_head * group + row % group;
    const int64_t token = batch.query_start[task.sequence] + task.first_query + row / group;
    finish(layer, sums + row, results + row * layer.width(), task.splits, rows,
           x.sinks ? x.sinks + head : nullptr,
           x.out + token * x.out_stride + head * layer.head_size);
  }
}

// Put the vectors of one token into the cache.
template <typename Cached, typename T>
void store_token(const Layer& layer, const Cached& cache, const Batch& batch, const Tensors<T>& x,
                 int64_t token) {
  const int64_t size = layer.head_size;
  thread_local std::vector<T> rotated;
  if (x.rotary) grow(rotated, size);
  for (int64_t head = 0; head < layer.kv_heads; ++head) {
    const T* k = x.k + token * x.k_stride + head * size;
    if (x.rotary) {
      rotate(k, x.rotary.from(token, size), size, rotated.data());
      k = rotated.data();
    }
    cache.store(batch.slots[token], head, k, x.v + token * x.v_stride + head * size, size);
  }
}

// Results that await a merge go to their rows of `all_sums` and `all_results`.
template <typename Tiles, typename T>
void run(const Layer& layer, const Batch& batch, const Tensors<T>& x, const Task& task,
         Sums* all_sums, float* all_results) {
  thread_local Workspace<Tiles> work;
  const int64_t token = batch.query_start[task.sequence] + task.first_query;
  const int64_t head = task.kv_head * layer.group();
  Attention<Tiles>(layer, task, batch.tables + task.sequence * batch.table_stride, work)
      .run(x.q + token * x.q_stride + head * layer.head_size, x.q_stride,
           x.rotary ? x.rotary.from(token, layer.head_size) : x.rotary);
  if (task.splits == 1)
    return finish_rows(layer, batch, x, task, work.sums.data(), work.result.data());
  std::copy(work.sums.begin(), work.sums.end(), all_sums + task.partial);
  std::copy(work.result.begin(), work.result.end(), all_results + task.partial * layer.width());
}

// `Cached` is a Cache or CodedCache. Tiles are of type `Few`, or `Many` in tasks of at least
// `many_rows` rows.
template <typename Cached, typename Few, typename Many, typename T>
void forward(const Layer& layer, const Batch& batch, const Tensors<T>& x, int64_t many_rows) {
  const Cached cache(layer);
  const int64_t width = layer.width(), group = layer.group();
  // Kept from call to call. The threads of the team reach the caller's through these pointers.
  thread_local std::vector<Task> planned;
  thread_local std::vector<Sums> waiting_sums;
  thread_local std::vector<float> waiting_results;
  const int64_t waiting_rows = plan(layer, batch, planned);
  grow(waiting_sums, waiting_rows);
  grow(waiting_results, waiting_rows * width);
  const Task* tasks = planned.data();
  Sums* all_sums = waiting_sums.data();
  float* all_results = waiting_results.data();
  const int64_t num_tasks = planned.size();

#pragma omp parallel
  {
#pragma omp for
    for (int64_t t = 0; t < batch.tokens; ++t) store_token(layer, cache, batch, x, t);

#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < num_tasks; ++i) {
      const Task& task = tasks[i];
      if (task.queries * group < many_rows) {
        run<Few>(layer, batch, x, task, all_sums, all_results);
      } else {
        run<Many>(layer, batch, x, task, all_sums, all_results);
      }
    }

#pragma omp for schedule(dynamic, 16)
    for (int64_t i = 0; i < num_tasks; ++i)
      if (tasks[i].splits > 1 && tasks[i].split == 0)
        finish_rows(layer, batch, x, tasks[i], all_sums + tasks[i].partial,
                    all_results + tasks[i].partial * width);
  }
}

template <typename Format, typename Element, typename T>
void forward_coded(const Layer& layer, const Batch& batch, const Tensors<T>& x) {
  using Cached = CodedCache<Element>;
  // Of what must be widened anyway, only pairs are worth being narrow.
  using Computed = std::conditional_t<Format::PAIR == 2, Format, Single<float>>;
  forward<Cached, WidenedTiles<Cached, Computed>, WidenedTiles<Cached, Single<float>>>(
      layer, batch, x, Format::WIDE_ROWS);
}

template <typename Format>
void forward(const Layer& layer, const Batch& batch, const void* q, const void* k, const void* v,
             void* out, const int64_t* strides, const float* sinks, const void* cos,
             const void* sin) {
  using T = typename Format::Stored;
  const Tensors<T> x = {static_cast<const T*>(q), static_cast<const T*>(k),
                        static_cast<const T*>(v), static_cast<T*>(out), strides[0], strides[1],
                        strides[2], strides[3], sinks,
                        {static_cast<const T*>(cos), static_cast<const T*>(sin)}};
  switch (layer.element) {
    case 0:
      return forward<Cache<Format>, StoredTiles<Format>,
                     WidenedTiles<Cache<Format>, Single<float>>>(layer, batch, x,
                                                                 Format::WIDE_ROWS);
    case 1: return forward_coded<Format, Float8<3>>(layer, batch, x);
    case 2: return forward_coded<Format, Float8<2>>(layer, batch, x);
    case 3: return forward_coded<Format, Int8>(layer, batch, x);
    case 4:
      if (layer.scale_per_vector) return forward_coded<Format, AffineInt4>(layer, batch, x);
      return forward_coded<Format, Int4>(layer, batch, x);
  }
}

}  // namespace pageloom

// Store K and V of one step and one layer, then attend. `strides` are those of the rows of q, k, v
// and out, in elements. `cos` and `sin`, if not null, are for q and k that are not yet rotated.
extern "C" void pageloom_forward(const pageloom::Layer* layer, const pageloom::Batch* batch,
                                 const void* q, const void* k, const void* v, void* out,
                                 const int64_t* strides, const float* sinks, const void* cos,
                                 const void* sin) {
  using namespace pageloom;
  switch (layer->dtype) {
    case 0: return forward<Single<float>>(*layer, *batch, q, k, v, out, strides, sinks, cos, sin);
    case 1: return forward<BFloat16>(*layer, *batch, q, k, v, out, strides, sinks, cos, sin);
    case 2: return forward<Single<float16>>(*layer, *batch, q, k, v, out, strides, sinks, cos, sin);
  }
}
