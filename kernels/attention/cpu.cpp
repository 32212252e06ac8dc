// Attention of a flat batch over the paged cache, with a running softmax.
//
// A tile is some query tokens of one sequence times the heads that share one key head: its rows meet
// the sequence's keys in chunks. A tile of few rows (decode) reads values as they lie; a tall one packs
// those of each chunk into panels first. The keys are cut into parts, each summed by itself and added to
// those before it. Threads share the parts of a sequence that makes one tile, else the tiles.
//
// A row's sums are made in an order that follows from its position alone: not from the rows beside it,
// the number of threads, or where the sequence's rows were cut into steps.

#include <algorithm>
#include <atomic>
#include <vector>

#include "attention/few_rows.h"
#include "attention/many_rows.h"
#include "native/pool.h"

using namespace attention;

namespace {

constexpr int TILE_ROWS = 144;
constexpr int FEW_ROWS = 8;  // up to this many, packing a chunk does not pay
constexpr float LOG2E = 1.44269504f;

// Sixteen scores from key i on as powers of two; those of keys that the row does not see: -inf.
template <typename E>
V scaled(const Batch<E>& b, float* s, int i, int from, int to) {
  V x = load(s + i);
  if (b.softcap > 0)
    x = mul(tanh(mul(x, fill(b.scaling / b.softcap))), fill(b.softcap * LOG2E));
  else
    x = mul(x, fill(b.scaling * LOG2E));
  store(s + i, x);
  if (i >= from && i + LANES <= to) return x;
  for (int k = i; k < i + LANES; k++)
    if (k < from || k >= to) s[k] = -INFINITY;
  return load(s + i);
}

// Turns the scores of one row into weights, and rescales its running sums.
template <typename E>
void soften(const Batch<E>& b, Tile<E>& t, long row) {
  const int from = t.first_seen(row, b.n.window), to = t.end_seen(row);
  float* s = t.scores + row * CHUNK;
  Factor<E>* w = t.weights + row * CHUNK;
  const int begin = from < to ? from / LANES * LANES : CHUNK, end = int(round_up(to, LANES));
  for (int i = 0; i < CHUNK; i += LANES)
    if (i < begin || i >= end) store(s + i, zero()), store(w + i, zero());
  if (from >= to) return;
  V peak = fill(-INFINITY);
  for (int i = begin; i < end; i += LANES) {
    const V x = scaled(b, s, i, from, to);
    store(s + i, x);
    peak = max(peak, x);
  }
  const float before = t.now.peak[row], now = std::max(before, highest(peak));
  V total = zero();
  for (int i = begin; i < end; i += LANES) {
    const V p = exp2(sub(load(s + i), fill(now)));
    store(s + i, p), store(w + i, p);
    total = add(total, p);
  }
  const float shrink = before == -INFINITY ? 0.f : std::exp2(before - now);
  t.now.peak[row] = now;
  t.now.total[row] = t.now.total[row] * shrink + sum(total);
  if (shrink == 1.f) return;
  float* sums = t.now.mixed + row * t.width;
  for (long d = 0; d < t.width; d += LANES) store(sums + d, mul(load(sums + d), fill(shrink)));
}

// Sums up the keys [begin, end), which lie in one part.
template <typename E>
void attend_to_part(const Batch<E>& b, const Item& item, Tile<E>& t, long begin, long end) {
  const bool few = t.rows <= FEW_ROWS;
  clear(t.now, t.rows, t.width);
  for (long key = begin; key < end; key = t.begin + CHUNK) {
    locate(b, item, t, key, end);
    if (key == item.key_begin)
      for (int j = 0; j < t.count; j++) prefetch_row(t.key[j], b.n.key_dim);
    for_row_tiles<ROWS_AT_ONCE>(t.rows, [&]<int ROWS>(long r) { score_rows<E, ROWS>(b, t, r); });
    for (long r = 0; r < t.rows; r++) soften(b, t, r);
    if (few)
      for_row_tiles<ROWS_AT_ONCE>(t.rows, [&]<int ROWS>(long r) { mix_rows<E, ROWS>(b, t, r); });
    else
      mix_panels(b, t);
  }
}

struct RowSums {
  float *mixed, *peak, *total;
};

RowSums row_of(const Sums& sums, long row, long width) {
  return {sums.mixed + row * width, sums.peak + row, sums.total + row};
}

// Adds what a row got from one part to what it got from those before.
void fold(const RowSums& all, const RowSums& part, long width) {
  if (*part.peak == -INFINITY) return;  // it saw nothing
  if (*all.peak == -INFINITY) {
    std::copy(part.mixed, part.mixed + width, all.mixed);
    *all.peak = *part.peak, *all.total = *part.total;
    return;
  }
  const float peak = std::max(*all.peak, *part.peak);
  const float old = std::exp2(*all.peak - peak), fresh = std::exp2(*part.peak - peak);
  for (long d = 0; d < width; d += LANES)
    store(all.mixed + d, fma(load(part.mixed + d), fill(fresh), mul(load(all.mixed + d), fill(old))));
  *all.total = *all.total * old + *part.total * fresh;
  *all.peak = peak;
}

// Sums up all keys of the item: in `t.all`.
template <typename E>
void attend(const Batch<E>& b, const Item& item, Tile<E>& t) {
  for (long begin = item.key_begin, end; begin < item.key_end; begin = end) {
    end = std::min(item.key_end, begin / PART_KEYS * PART_KEYS + PART_KEYS);
    attend_to_part(b, item, t, begin, end);
    if (begin == item.key_begin)
      std::swap(t.now, t.all);
    else
      for (long r = 0; r < t.rows; r++) fold(row_of(t.all, r, t.width), row_of(t.now, r, t.width), t.width);
  }
}

// Writes one output row from its sums; a sink takes weight and gives nothing.
template <typename E>
void finish(const Batch<E>& b, const Item& item, long row, const RowSums& sums) {
  const long head = item.kv_head * b.group() + row % b.group();
  const long token = b.query_start[item.sequence] + item.first + row / b.group();
  float factor = 1.f, total = *sums.total;
  if (b.sinks) {
    const float sink = b.sinks[head] * LOG2E, now = std::max(*sums.peak, sink);
    factor = std::exp2(*sums.peak - now);
    total = total * factor + std::exp2(sink - now);
  }
  const V scale = fill(factor / total);
  E* out = b.out + (token * b.n.heads + head) * b.n.value_dim;
  for (long d = 0; d < b.n.value_dim; d += LANES)
    store(out + d, mul(load(sums.mixed + d, int(b.n.value_dim - d)), scale), int(b.n.value_dim - d));
}

template <typename E>
struct Plan {
  const Batch<E>& b;
  std::vector<Item> items;
  int merges = 0;
  long kept = 0;  // rows of results

  // Some query tokens and the keys [begin, end): one item for each key head, or for each of its parts.
  void add(long sequence, long first, long tokens, long begin, long end, bool split) {
    const long first_part = begin / PART_KEYS, last_part = (end - 1) / PART_KEYS;
    const long parts = split ? last_part - first_part + 1 : 1;
    for (long h = 0; h < b.n.kv_heads; h++) {
      for (long p = 0; p < parts; p++) {
        const long from = p ? (first_part + p) * PART_KEYS : begin;
        const long to = p + 1 < parts ? (first_part + p + 1) * PART_KEYS : end;
        items.push_back({sequence, h, first, tokens, from, to, p, parts, merges, kept});
      }
      if (parts > 1) merges++, kept += parts * tokens * b.group();
    }
  }
};

template <typename E>
void plan_sequence(Plan<E>& plan, long s) {
  const Batch<E>& b = plan.b;
  const long tile_tokens = std::max<long>(1, TILE_ROWS / b.group());
  const long queries = b.query_start[s + 1] - b.query_start[s], length = b.lengths[s];
  if (length == 0) {  // padding
    const long row = b.n.heads * b.n.value_dim;
    std::memset((void*)(b.out + b.query_start[s] * row), 0, queries * row * sizeof(E));
    return;
  }
  const long tiles = (queries + tile_tokens - 1) / tile_tokens;
  for (long i = tiles - 1; i >= 0; i--) {  // the last tile sees most keys: the longest work first
    const long first = queries * i / tiles, last = queries * (i + 1) / tiles;
    const long end = length - queries + last, oldest = length - queries + first - b.n.window + 1;
    plan.add(s, first, last - first, b.n.window > 0 ? std::max<long>(0, oldest) : 0, end, tiles == 1);
  }
}

struct Kept {  // results of parts: [rows, width + 2]
  float* data;
  long width;
  RowSums row(const Item& item, long part, long r, long rows) const {
    float* at = data + (item.kept + part * rows + r) * (width + 2);
    return {at, at + width, at + width + 1};
  }
};

template <typename E>
void merge(const Batch<E>& b, const Item& item, const Kept& kept) {
  const long rows = item.tokens * b.group();
  for (long r = 0; r < rows; r++) {
    const RowSums all = kept.row(item, 0, r, rows);
    for (long p = 1; p < item.parts; p++) fold(all, kept.row(item, p, r, rows), kept.width);
    finish(b, item, r, all);
  }
}

template <typename E>
void attend_to(const Batch<E>& b, const Item& item, const Kept& kept, int* undone) {
  static thread_local Scratch scratch;
  Tile<E> t = make_tile(b, item, scratch);
  attend(b, item, t);
  for (long r = 0; r < t.rows; r++) {
    const RowSums sums = row_of(t.all, r, t.width);
    if (item.parts == 1) {
      finish(b, item, r, sums);
      continue;
    }
    const RowSums row = kept.row(item, item.part, r, t.rows);
    std::copy(sums.mixed, sums.mixed + t.width, row.mixed);
    *row.peak = *sums.peak, *row.total = *sums.total;
  }
  // Who finishes last merges.
  if (item.parts > 1 && std::atomic_ref(undone[item.merge]).fetch_sub(1) == 1) merge(b, item, kept);
}

template <typename E>
void paged_attention(const Batch<E>& b, int threads) {
  Plan<E> plan{b};
  for (long s = 0; s < b.n.sequences; s++) plan_sequence(plan, s);
  static thread_local Scratch rows, counters;
  const long width = round_up(b.n.value_dim, PANEL);
  const Kept kept{(float*)rows.reserve(plan.kept * (width + 2) * sizeof(float) + 64), width};
  int* undone = (int*)counters.reserve(plan.merges * sizeof(int) + 64);
  for (const Item& item : plan.items)
    if (item.parts > 1) undone[item.merge] = int(item.parts);
  const auto body = [&](long i) { attend_to(b, plan.items[i], kept, undone); };
  pool::parallel_for(long(plan.items.size()), threads, body, 1);
}

}  // namespace

#define LORAPLEX_ATTENTION(E, NAME)                                                                  \
  extern "C" void NAME(const E* query, const E* keys, const E* values, E* out, const int64_t* tables, \
                       const int64_t* query_start, const int64_t* lengths, const float* sinks,       \
                       const Sizes* sizes, float scaling, float softcap, int threads) {              \
    paged_attention<E>({query, keys, values, out, tables, query_start, lengths, sinks, *sizes,       \
                        scaling, softcap},                                                           \
                       threads);                                                                     \
  }

LORAPLEX_ATTENTION(float, lpx_attention_float)
LORAPLEX_ATTENTION(bf16, lpx_attention_bf16)
