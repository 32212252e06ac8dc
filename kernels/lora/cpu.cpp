// The LoRA deltas of a flat batch. A task is some rows of one adapter: they are shrunk to its ranks,
// and expanded to the output's columns while they are still at hand. Tasks share nothing, so one
// parallel loop does any mix of adapters. Work follows each adapter's own ranks; rows of no adapter are
// not touched. Sums are float, and the output is rounded once.

#include <algorithm>
#include <vector>

#include "native/panel.h"
#include "native/pool.h"
#include "native/scratch.h"
#include "native/shuffle.h"

using namespace simd;

namespace {

constexpr long ROW_BLOCK = 24, RANK_BLOCK = 4, ROWS_AT_ONCE = SUMS / RANK_BLOCK;

struct Slice {
  int64_t start, width, rank;
  const void* b;  // panels of output columns: [ceil(width / 32)][ceil(rank / STEP)][32][STEP]
};

struct Operand {
  const void* a;        // of a linear: [ceil(ranks / 4)][ceil(depth / LINE)][4][LINE], zeros for padding;
                        // of an embedding: [vocabulary][ranks]
  const float* scales;  // [ranks], padded to a multiple of 4
  int64_t depth;        // how many numbers of A a row meets for each rank: 1 in an embedding
  int64_t ranks, slices;
  Slice slice[];

  long padded_ranks() const { return (ranks + RANK_BLOCK - 1) / RANK_BLOCK * RANK_BLOCK; }
};

struct Batch {  // by slot; see LoRABatch
  const Operand* const* table;
  const int64_t *rows, *slots, *starts;
  long capacity;
};

template <typename E>
struct Output {
  E* data;
  long stride;
};

struct Task {
  const Operand* operand;
  const int64_t* rows;
  long count;
  long part, parts;  // of each slice's panels
};

// A block of rows on their way: [rows, stride], one number for each rank. Bfloat16 weights meet them as the
// sum of two bfloat16 numbers each, which is good to 2^-16.
template <typename E>
struct Hidden {
  float* wide;
  E *upper, *lower;
  long stride;

  Hidden(const Task& task, Scratch& scratch) {
    stride = task.operand->padded_ranks() + 2;  // a pair may begin at the last rank
    const long numbers = (task.count * stride + LANES - 1) / LANES * LANES;
    wide = (float*)scratch.reserve(numbers * (sizeof(float) + 2 * sizeof(E)) + 64);
    upper = (E*)(wide + numbers), lower = upper + numbers;
    std::fill(wide, wide + numbers, 0.f);
  }

  void split(long rows) {
    for (long i = 0; i < rows * stride; i += LANES) {
      const V v = load(wide + i);
      store(upper + i, v);
      store(lower + i, sub(v, load(upper + i)));
    }
  }
};

template <typename E, int ROWS>
void dot_tile(const Operand& operand, const E* const* x, float* hidden, long stride, long rank) {
  using R = Run<E>;
  constexpr long LINE = 64 / sizeof(E);
  const long depth = operand.depth;
  const E* a = (const E*)operand.a + rank * ((depth + LINE - 1) / LINE * LINE);
  V acc[SUMS];
  for (V& v : acc) v = zero();
  const auto step = [&](long d, auto... left) {
    typename R::type w[RANK_BLOCK];
    const E* line = a + d / LINE * LINE * RANK_BLOCK + d % LINE;
    for (int r = 0; r < RANK_BLOCK; r++) w[r] = R::read(line + r * LINE);
    for (int t = 0; t < ROWS; t++) {
      const auto v = R::read(x[t] + d, left...);
      for (int r = 0; r < RANK_BLOCK; r++) acc[t * RANK_BLOCK + r] = R::dot(acc[t * RANK_BLOCK + r], v, w[r]);
    }
  };
  long d = 0;
  for (; d + R::WIDTH <= depth; d += R::WIDTH) step(d);
  if (d < depth) step(d, int(depth - d));
  float sums[SUMS];
  store_sums(sums, acc);
  for (int t = 0; t < ROWS; t++)
    for (int r = 0; r < RANK_BLOCK; r++)
      hidden[t * stride + rank + r] = sums[t * RANK_BLOCK + r] * operand.scales[rank + r];
}

template <typename E>
void shrink(const Task& task, const E* x, long x_stride, float* hidden, long stride) {
  const E* row[ROW_BLOCK];
  for (long t = 0; t < task.count; t++) row[t] = x + task.rows[t] * x_stride;
  for (long rank = 0; rank < task.operand->ranks; rank += RANK_BLOCK)
    for_row_tiles<ROWS_AT_ONCE>(task.count, [&]<int ROWS>(long t) {
      dot_tile<E, ROWS>(*task.operand, row + t, hidden + t * stride, stride, rank);
    });
}

template <typename E>
void look_up(const Task& task, const int64_t* tokens, float embed_scale, float* hidden, long stride) {
  for (long t = 0; t < task.count; t++) {
    const E* a = (const E*)task.operand->a + tokens[task.rows[t]] * task.operand->ranks;
    for (long r = 0; r < task.operand->ranks; r++)
      hidden[t * stride + r] = to_float(a[r]) * embed_scale * task.operand->scales[r];
  }
}

template <int ROWS>
void multiply(V (&acc)[ROWS][2], const Hidden<float>& h, long at, const float* panel, long steps) {
  multiply_panel<float, ROWS>(acc, h.wide + at, h.stride, panel, steps);
}

template <int ROWS>
void multiply(V (&acc)[ROWS][2], const Hidden<bf16>& h, long at, const bf16* panel, long steps) {
#ifdef __AVX512BF16__
  multiply_panel<bf16, ROWS>(acc, h.upper + at, h.stride, panel, steps);
  multiply_panel<bf16, ROWS>(acc, h.lower + at, h.stride, panel, steps);
#else
  multiply_panel<bf16, ROWS>(acc, h.wide + at, h.stride, panel, steps);
#endif
}

template <typename E>
void expand(const Task& task, const Slice& slice, const Hidden<E>& hidden, long rank, Output<E> out) {
  const long steps = (slice.rank + PanelStep<E>::STEP - 1) / PanelStep<E>::STEP;
  const long panels = (slice.width + PANEL - 1) / PANEL;
  for (long p = panels * task.part / task.parts; p < panels * (task.part + 1) / task.parts; p++) {
    const E* panel = (const E*)slice.b + p * steps * PANEL * PanelStep<E>::STEP;
    const int left = int(std::min<long>(PANEL, slice.width - p * PANEL));
    for_row_tiles(task.count, [&]<int ROWS>(long t) {
      V acc[ROWS][2];
      for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = zero();
      multiply<ROWS>(acc, hidden, t * hidden.stride + rank, panel, steps);
      for (int i = 0; i < ROWS; i++) {
        E* y = out.data + task.rows[t + i] * out.stride + slice.start + p * PANEL;
        for (int c = 0; c < 2 && left > c * LANES; c++) {
          const int n = left - c * LANES;
          store(y + c * LANES, add(load(y + c * LANES, n), acc[i][c]), n);
        }
      }
    });
  }
}

// Bytes of an operand of the expand product.
long expand_bytes(const Operand& operand, long element_bytes) {
  long numbers = 0;
  for (long i = 0; i < operand.slices; i++) numbers += operand.slice[i].rank * operand.slice[i].width;
  return numbers * element_bytes;
}

struct Plan {
  std::vector<Task> tasks;
  long work = 0;  // bytes of weights to be read, again for every few rows

  Plan(const Batch& batch, long element_bytes, int threads) {
    constexpr long FEW_ROWS = 4;
    long blocks = 0;
    for_segments(batch, [&](const Operand&, const int64_t*, long count) {
      blocks += (count + ROW_BLOCK - 1) / ROW_BLOCK;
    });
    for_segments(batch, [&](const Operand& operand, const int64_t* rows, long count) {
      const long shrunk = operand.ranks * operand.depth * element_bytes;
      const long expanded = expand_bytes(operand, element_bytes);
      const long row_blocks = (count + ROW_BLOCK - 1) / ROW_BLOCK;
      const long parts = std::max(parts_of(shrunk, expanded), expanded > PART_BYTES ? threads / blocks : 1);
      for (long i = 0; i < row_blocks; i++) {
        const long first = count * i / row_blocks, end = count * (i + 1) / row_blocks;
        for (long p = 0; p < parts; p++) tasks.push_back({&operand, rows + first, end - first, p, parts});
      }
      work += (shrunk + expanded) * ((count + FEW_ROWS - 1) / FEW_ROWS);
    });
  }

 private:
  static constexpr long PART_BYTES = 32 * 1024;

  // Every part computes the whole shrink product, which must be small beside the expand product.
  static long parts_of(long shrunk, long expanded) {
    return std::max(1L, expanded / std::max(PART_BYTES, 8 * shrunk));
  }

  // The segments that have both rows and weights.
  template <typename Body>
  static void for_segments(const Batch& batch, Body body) {
    for (long i = 0; i < batch.capacity; i++) {
      const long start = batch.starts[i], count = batch.starts[i + 1] - start;
      if (batch.slots[i] < 0 || count == 0) continue;
      const Operand* operand = batch.table[batch.slots[i]];
      if (operand) body(*operand, batch.rows + start, count);
    }
  }
};

template <typename E, typename Shrink>
void add_lora(Output<E> out, const Batch& batch, int threads, Shrink shrink_task) {
  constexpr long GRAIN = 64 * 1024;  // bytes worth a thread
  const Plan plan(batch, sizeof(E), threads);
  const auto body = [&](long i) {
    static thread_local Scratch scratch;
    const Task& task = plan.tasks[i];
    Hidden<E> hidden(task, scratch);
    shrink_task(task, hidden.wide, hidden.stride);
    if constexpr (sizeof(E) == 2) hidden.split(task.count);
    long rank = 0;
    for (long s = 0; s < task.operand->slices; s++) {
      expand(task, task.operand->slice[s], hidden, rank, out);
      rank += task.operand->slice[s].rank;
    }
  };
  const int useful = int(std::clamp<long>(plan.work / GRAIN, 1, threads));
  pool::parallel_for(long(plan.tasks.size()), useful, body, 1);
}

}  // namespace

#define LORAPLEX_ADD_LORA(E, LINEAR, EMBEDDING)                                                          \
  extern "C" void LINEAR(E* out, long out_stride, const E* x, long x_stride, const Operand* const* table, \
                         const int64_t* rows, const int64_t* slots, const int64_t* starts,               \
                         long capacity, int threads) {                                                   \
    const auto shrink_task = [&](const Task& task, float* hidden, long stride) {                         \
      shrink<E>(task, x, x_stride, hidden, stride);                                                      \
    };                                                                                                   \
    add_lora<E>({out, out_stride}, {table, rows, slots, starts, capacity}, threads, shrink_task);        \
  }                                                                                                      \
  extern "C" void EMBEDDING(E* out, long out_stride, const int64_t* tokens, float embed_scale,           \
                            const Operand* const* table, const int64_t* rows, const int64_t* slots,      \
                            const int64_t* starts, long capacity, int threads) {                         \
    const auto shrink_task = [&](const Task& task, float* hidden, long stride) {                         \
      look_up<E>(task, tokens, embed_scale, hidden, stride);                                             \
    };                                                                                                   \
    add_lora<E>({out, out_stride}, {table, rows, slots, starts, capacity}, threads, shrink_task);        \
  }

LORAPLEX_ADD_LORA(float, lpx_add_lora_float, lpx_add_embedding_lora_float)
LORAPLEX_ADD_LORA(bf16, lpx_add_lora_bf16, lpx_add_embedding_lora_bf16)
