// The LoRA deltas of a flat batch: for each segment (some rows and their adapter) first all rows are
// taken down to the adapter's ranks, then up to the output's columns. Work follows each adapter's own
// ranks; rows of no segment are not touched. Sums are float, and the output is rounded once.

#include <algorithm>
#include <vector>

#include "native/panel.h"
#include "native/pool.h"
#include "native/scratch.h"

using namespace simd;

namespace {

constexpr long ROW_BLOCK = 48, RANK_BLOCK = 16, COLUMN_BLOCK = 8 * PANEL;

struct Slice {
  int64_t start, width, rank;
  const void* b;  // panels of output columns: [ceil(width / 32)][ceil(rank / STEP)][32][STEP]
  double scaling;
};

struct Operand {
  const void* a;  // [sum of ranks, depth]
  int64_t depth, slices;
  Slice slice[];
};

struct Segment {
  const int64_t* rows;
  int64_t count;
  const Operand* operand;
};

struct Rows {  // of a batch, by slot; see LoRABatch
  const int64_t *rows, *slots, *starts;
  long capacity;
};

template <typename E>
struct Batch {
  E* out;
  long out_stride;
  const E* x;
  long x_stride;
  const Segment* segments;
  long count;
};

struct Item {  // one slice of one segment, and the part of it that one thread takes
  const Segment* segment;
  const Slice* slice;
  long first_rank;    // of the slice, among the rows of A
  float* hidden;      // [rows, hidden_stride], the slice's own columns
  long hidden_stride;
  long row, rows;     // of the segment
  long begin, end;    // ranks on the way down, columns on the way up
};

template <typename E, int ROWS, int RANKS>
void dot_tile(const Batch<E>& b, const Item& item, long row, long rank) {
  using R = Run<E>;
  const long depth = item.segment->operand->depth;
  const E* a = (const E*)item.segment->operand->a + (item.first_rank + rank) * depth;
  const E* x[ROWS];
  for (int t = 0; t < ROWS; t++) x[t] = b.x + item.segment->rows[row + t] * b.x_stride;
  V acc[ROWS][RANKS];
  for (auto& of_row : acc)
    for (V& v : of_row) v = zero();
  const auto step = [&](long d, auto... left) {
    typename R::type w[RANKS];
    for (int r = 0; r < RANKS; r++) w[r] = R::read(a + r * depth + d, left...);
    for (int t = 0; t < ROWS; t++) {
      const auto v = R::read(x[t] + d, left...);
      for (int r = 0; r < RANKS; r++) acc[t][r] = R::dot(acc[t][r], v, w[r]);
    }
  };
  long d = 0;
  for (; d + R::WIDTH <= depth; d += R::WIDTH) step(d);
  if (d < depth) step(d, int(depth - d));
  for (int t = 0; t < ROWS; t++)
    for (int r = 0; r < RANKS; r++)
      item.hidden[(row + t) * item.hidden_stride + rank + r] =
          sum(acc[t][r]) * float(item.slice->scaling);
}

template <typename E>
void shrink(const Batch<E>& b, const Item& item) {
  for_row_tiles<4>(item.rows, [&]<int ROWS>(long t) {
    for_row_tiles<4>(item.end - item.begin, [&]<int RANKS>(long r) {
      dot_tile<E, ROWS, RANKS>(b, item, item.row + t, item.begin + r);
    });
  });
}

template <typename E>
void expand(const Batch<E>& b, const Item& item) {
  const long steps = (item.slice->rank + PanelStep<E>::STEP - 1) / PanelStep<E>::STEP;
  for (long n = item.begin; n < item.end; n += PANEL) {
    const E* panel = (const E*)item.slice->b + n * steps * PanelStep<E>::STEP;
    for_row_tiles<4>(item.rows, [&]<int ROWS>(long t) {
      V acc[ROWS][2];
      for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = zero();
      const float* hidden = item.hidden + (item.row + t) * item.hidden_stride;
      multiply_panel<E, ROWS>(acc, hidden, item.hidden_stride, panel, steps);
      for (int i = 0; i < ROWS; i++) {
        E* out = b.out + item.segment->rows[item.row + t + i] * b.out_stride + item.slice->start + n;
        for (int c = 0; c < 2; c++) {
          const int left = int(item.slice->width - n) - c * LANES;
          if (left > 0) store(out + c * LANES, add(load(out + c * LANES, left), acc[i][c]), left);
        }
      }
    });
  }
}

constexpr long padded(long rank) { return rank + rank % 2; }

// Cuts the whole of one slice, [0, extent) of its ranks or columns, into items.
void cut(std::vector<Item>& items, Item whole, long extent, long block) {
  for (long row = 0; row < whole.segment->count; row += ROW_BLOCK)
    for (long begin = 0; begin < extent; begin += block) {
      whole.row = row, whole.rows = std::min(ROW_BLOCK, whole.segment->count - row);
      whole.begin = begin, whole.end = std::min(begin + block, extent);
      items.push_back(whole);
    }
}

template <typename E>
void add_lora(const Batch<E>& b, int threads) {
  static thread_local Scratch scratch;
  static thread_local std::vector<Item> down, up;
  long numbers = 0;
  for (long s = 0; s < b.count; s++)
    for (long i = 0; i < b.segments[s].operand->slices; i++)
      numbers += b.segments[s].count * padded(b.segments[s].operand->slice[i].rank);
  float* hidden = (float*)scratch.reserve(numbers * sizeof(float) + 64);
  down.clear(), up.clear();
  for (long s = 0; s < b.count; s++) {
    const Segment& segment = b.segments[s];
    long first_rank = 0;
    for (long i = 0; i < segment.operand->slices; i++) {
      const Slice& slice = segment.operand->slice[i];
      const long stride = padded(slice.rank);
      const Item whole{&segment, &slice, first_rank, hidden, stride, 0, 0, 0, 0};
      cut(down, whole, slice.rank, RANK_BLOCK);
      cut(up, whole, slice.width, COLUMN_BLOCK);
      if (slice.rank % 2)  // meets zeros in the panels, so it must not be NaN
        for (long t = 0; t < segment.count; t++) hidden[t * stride + slice.rank] = 0;
      first_rank += slice.rank;
      hidden += segment.count * stride;
    }
  }
  const std::vector<Item>&first = down, &second = up;
  pool::parallel_for(long(first.size()), threads, [&](long i) { shrink(b, first[i]); }, 1);
  pool::parallel_for(long(second.size()), threads, [&](long i) { expand(b, second[i]); }, 1);
}

// The segments of a batch that have both rows and weights.
void find_segments(std::vector<Segment>& found, const Operand* const* table, const Rows& batch) {
  found.clear();
  for (long i = 0; i < batch.capacity; i++) {
    const int64_t slot = batch.slots[i], start = batch.starts[i], count = batch.starts[i + 1] - start;
    if (slot >= 0 && count > 0 && table[slot]) found.push_back({batch.rows + start, count, table[slot]});
  }
}

// As many threads as have enough to do: a thread is worth the reading of some weights.
int useful_threads(const std::vector<Segment>& segments, long element_bytes, int threads) {
  constexpr long GRAIN = 64 * 1024, FEW_ROWS = 4;
  long work = 0;
  for (const Segment& segment : segments) {
    long numbers = 0;
    for (long i = 0; i < segment.operand->slices; i++) {
      const Slice& slice = segment.operand->slice[i];
      numbers += slice.rank * (segment.operand->depth + slice.width);
    }
    work += numbers * element_bytes * ((segment.count + FEW_ROWS - 1) / FEW_ROWS);
  }
  return int(std::max(1L, std::min<long>(threads, work / GRAIN)));
}

template <typename E>
void run(E* out, long out_stride, const E* x, long x_stride, const Operand* const* table,
         const Rows& batch, int threads) {
  static thread_local std::vector<Segment> segments;
  find_segments(segments, table, batch);
  if (segments.empty()) return;
  add_lora<E>({out, out_stride, x, x_stride, segments.data(), long(segments.size())},
              useful_threads(segments, sizeof(E), threads));
}

}  // namespace

#define LORAPLEX_ADD_LORA(E, NAME)                                                                  \
  extern "C" void NAME(E* out, long out_stride, const E* x, long x_stride,                          \
                       const Operand* const* table, const int64_t* rows, const int64_t* slots,      \
                       const int64_t* starts, long capacity, int threads) {                         \
    run<E>(out, out_stride, x, x_stride, table, {rows, slots, starts, capacity}, threads);          \
  }

LORAPLEX_ADD_LORA(float, lpx_add_lora_float)
LORAPLEX_ADD_LORA(bf16, lpx_add_lora_bf16)
