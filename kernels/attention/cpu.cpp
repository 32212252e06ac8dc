// Attention of a flat batch over the paged cache, with a running softmax.
//
// A tile is some query tokens of one sequence times the heads that share one key head: its rows meet
// the sequence's keys in chunks. A tile of few rows (decode) reads the cache as it lies; a tall one
// packs each chunk into panels first. A sequence that makes one tile is split over its keys into
// parts, whose results are merged; the cut depends on its length only, never on the batch.

#include <algorithm>
#include <type_traits>
#include <vector>

#include "native/panel.h"
#include "native/pool.h"
#include "native/scratch.h"

using namespace simd;

namespace {

constexpr int CHUNK = 64;        // keys
constexpr int TILE_ROWS = 144;   // query rows
constexpr int FEW_ROWS = 8;      // up to this many, packing a chunk does not pay
constexpr int PART_KEYS = 1024;   // keys of one part
constexpr int AHEAD = CHUNK;     // keys that are asked for ahead of their use
constexpr float LOG2E = 1.44269504f;

struct Sizes {
  int64_t sequences, heads, kv_heads, block_size, key_dim, value_dim;
  int64_t query_token, query_head;          // strides, in elements
  int64_t key_block, key_head, key_token;
  int64_t value_block, value_head, value_token;
  int64_t table_row, window;                // a window of 0: none
};

template <typename E>
struct Batch {
  const E *query, *keys, *values;
  E* out;  // [T, heads, value_dim]
  const int64_t *tables, *query_start, *lengths;
  const float* sinks;  // [heads] or null
  Sizes n;
  float scaling, softcap;  // a cap of 0: none

  long group() const { return n.heads / n.kv_heads; }
};

struct Item {
  long sequence, kv_head;
  long first, tokens;      // query tokens, counted within the sequence's own
  long key_begin, key_end;
  long part, parts;        // part: row of the partial results, -1 where there is one part only
};

template <typename E>
struct Tile {  // one item at work; arrays lie in the thread's scratch
  long rows, group, depth;  // depth: key_dim rounded up, the stride of `query`
  long width;               // value_dim rounded up, the stride of `sums`
  E* query;                 // [rows, depth], zeros behind key_dim
  float* scores;            // [rows, CHUNK]
  E* weights;               // [rows, CHUNK], for panels
  E* packed;                // one chunk of keys or of values in panels
  float* sums;              // [rows, width]
  float *peak, *total;      // [rows]
  const E *key[CHUNK + AHEAD], *value[CHUNK];
};

constexpr long round_up(long n, long to) { return (n + to - 1) / to * to; }

template <typename E>
Tile<E> make_tile(const Batch<E>& b, const Item& item, Scratch& scratch) {
  Tile<E> t;
  t.group = b.group();
  t.rows = item.tokens * t.group;
  t.depth = round_up(b.n.key_dim, 2 * LANES);
  t.width = round_up(b.n.value_dim, PANEL);
  const long packed = CHUNK * std::max(t.depth, t.width);
  const size_t numbers = t.rows * (CHUNK + t.width + 2);
  const size_t elements = t.rows * (t.depth + CHUNK) + packed;
  float* f = (float*)scratch.reserve(numbers * sizeof(float) + elements * sizeof(E) + 64);
  t.scores = f;
  t.sums = t.scores + t.rows * CHUNK;
  t.peak = t.sums + t.rows * t.width;
  t.total = t.peak + t.rows;
  t.query = (E*)(t.total + t.rows);
  t.weights = t.query + t.rows * t.depth;
  t.packed = t.weights + t.rows * CHUNK;
  std::fill(t.sums, t.sums + t.rows * t.width, 0.f);
  std::fill(t.peak, t.peak + t.rows, -INFINITY);
  std::fill(t.total, t.total + t.rows, 0.f);
  for (long r = 0; r < t.rows; r++) {
    const long token = b.query_start[item.sequence] + item.first + r / t.group;
    const long head = item.kv_head * t.group + r % t.group;
    E* row = t.query + r * t.depth;
    std::memcpy(row, b.query + token * b.n.query_token + head * b.n.query_head,
                b.n.key_dim * sizeof(E));
    std::memset((void*)(row + b.n.key_dim), 0, (t.depth - b.n.key_dim) * sizeof(E));
  }
  return t;
}

// Finds the rows of a chunk's keys and values, and of some keys behind it, in the blocks.
template <typename E>
void locate(const Batch<E>& b, const Item& item, Tile<E>& t, long begin, int count) {
  const int64_t* table = b.tables + item.sequence * b.n.table_row;
  const E* keys = b.keys + item.kv_head * b.n.key_head;
  const E* values = b.values + item.kv_head * b.n.value_head;
  const long end = std::min(begin + count + AHEAD, item.key_end);
  long block = begin / b.n.block_size, offset = begin % b.n.block_size;
  for (long i = 0; i < end - begin; i++) {
    t.key[i] = keys + table[block] * b.n.key_block + offset * b.n.key_token;
    if (i < count) t.value[i] = values + table[block] * b.n.value_block + offset * b.n.value_token;
    if (++offset == b.n.block_size) offset = 0, block++;
  }
  for (long i = end - begin; i < count + AHEAD; i++) t.key[i] = t.key[count - 1];
}

template <typename E>
inline void prefetch_row(const E* row, long columns) {
  for (long d = 0; d < columns; d += 64 / sizeof(E)) _mm_prefetch((const char*)(row + d), _MM_HINT_T0);
}

template <typename E, int ROWS>
void score_rows(const Batch<E>& b, Tile<E>& t, long first, int count) {
  using R = Run<E>;
  const E* query = t.query + first * t.depth;
  for (int j = 0; j < count; j++) {
    prefetch_row(t.value[j], b.n.value_dim);
    V acc[ROWS];
    for (int r = 0; r < ROWS; r++) acc[r] = zero();
    long d = 0;
    for (; d + R::WIDTH <= b.n.key_dim; d += R::WIDTH) {
      const auto k = R::read(t.key[j] + d);
      for (int r = 0; r < ROWS; r++) acc[r] = R::dot(acc[r], R::read(query + r * t.depth + d), k);
    }
    if (d < b.n.key_dim) {
      const auto k = R::read(t.key[j] + d, int(b.n.key_dim - d));
      for (int r = 0; r < ROWS; r++) acc[r] = R::dot(acc[r], R::read(query + r * t.depth + d), k);
    }
    for (int r = 0; r < ROWS; r++) t.scores[(first + r) * CHUNK + j] = sum(acc[r]);
  }
}

template <typename E, int ROWS>
void mix_rows(const Batch<E>& b, Tile<E>& t, long first, int count) {
  constexpr int C = ROWS <= 4 ? 4 : 2;
  for (long d = 0; d < b.n.value_dim; d += C * LANES) {
    const int left = int(std::min<long>(b.n.value_dim - d, C * LANES));
    float* sums = t.sums + first * t.width + d;
    V acc[ROWS][C];
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < C; c++) acc[r][c] = load(sums + r * t.width + c * LANES, left - c * LANES);
    for (int j = 0; j < count; j++) {
      // The next chunk's keys travel while this one's values are summed.
      for (int c = 0; c < C; c += 2) _mm_prefetch((const char*)(t.key[j + AHEAD] + d + c * LANES), _MM_HINT_T1);
      V v[C];
      if (left == C * LANES)
        for (int c = 0; c < C; c++) v[c] = load(t.value[j] + d + c * LANES);
      else
        for (int c = 0; c < C; c++) v[c] = load(t.value[j] + d + c * LANES, left - c * LANES);
      for (int r = 0; r < ROWS; r++) {
        const V p = fill(t.scores[(first + r) * CHUNK + j]);
        for (int c = 0; c < C; c++) acc[r][c] = fma(p, v[c], acc[r][c]);
      }
    }
    for (int r = 0; r < ROWS; r++)
      for (int c = 0; c < C; c++) store(sums + r * t.width + c * LANES, acc[r][c], left - c * LANES);
  }
}

// Keys as columns: [CHUNK / 32][depth / STEP][32][STEP]; columns from `count` on are zero.
template <typename E>
void pack_keys(const Batch<E>& b, Tile<E>& t, int count) {
  using Word = std::conditional_t<sizeof(E) == 2, uint32_t, float>;
  constexpr int STEP = PanelStep<E>::STEP;
  const long steps = t.depth / STEP, whole = b.n.key_dim / STEP;
  for (int j = 0; j < CHUNK; j++) {
    Word* out = (Word*)t.packed + j / PANEL * steps * PANEL + j % PANEL;
    long k = 0;
    if (j < count)
      for (; k < whole; k++) std::memcpy(out + k * PANEL, t.key[j] + k * STEP, sizeof(Word));
    if (j < count && whole * STEP < b.n.key_dim) {  // an odd half of a pair
      Word last = 0;
      std::memcpy(&last, t.key[j] + k * STEP, sizeof(E));
      out[k++ * PANEL] = last;
    }
    for (; k < steps; k++) out[k * PANEL] = 0;
  }
}

// Value dimensions as columns: [width / 32][CHUNK / STEP][32][STEP]; what is not there is zero.
void pack_values(const Batch<float>& b, Tile<float>& t, int count) {
  for (long d = 0; d < t.width; d += LANES)
    for (int j = 0; j < CHUNK; j++) {
      const int left = j < count ? int(b.n.value_dim - d) : 0;
      const V v = left > 0 ? load(t.value[j] + d, left) : zero();
      store(t.packed + d / PANEL * CHUNK * PANEL + j * PANEL + d % PANEL, v);
    }
}

void pack_values(const Batch<bf16>& b, Tile<bf16>& t, int count) {
  for (int j = 0; j < CHUNK; j += 2) {
    const uint16_t* upper = (const uint16_t*)t.value[std::min(j, count - 1)];
    const uint16_t* lower = (const uint16_t*)t.value[std::min(j + 1, count - 1)];
    const uint32_t has_upper = j < count ? 0xffffu : 0, has_lower = j + 1 < count ? 0xffff0000u : 0;
    for (long d = 0; d < t.width; d += PANEL) {
      uint32_t* out = (uint32_t*)t.packed + d * (CHUNK / 2) + j / 2 * PANEL;
      const long left = std::min<long>(PANEL, b.n.value_dim - d);
      if (left == PANEL)
        for (int i = 0; i < PANEL; i++)
          out[i] = (upper[d + i] & has_upper) | (uint32_t(lower[d + i]) << 16 & has_lower);
      else
        for (int i = 0; i < PANEL; i++)
          out[i] = i < left ? (upper[d + i] & has_upper) | (uint32_t(lower[d + i]) << 16 & has_lower)
                            : 0;
    }
  }
}

template <typename E>
void score_panels(const Batch<E>& b, Tile<E>& t, int count) {
  pack_keys(b, t, count);
  const long steps = t.depth / PanelStep<E>::STEP;
  for (int p = 0; p * PANEL < count; p++)
    for_row_tiles(t.rows, [&]<int ROWS>(long first) {
      V acc[ROWS][2];
      for (int r = 0; r < ROWS; r++) acc[r][0] = acc[r][1] = zero();
      multiply_panel<E, ROWS>(acc, t.query + first * t.depth, t.depth,
                              t.packed + p * t.depth * PANEL, steps);
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++)
          store(t.scores + (first + r) * CHUNK + p * PANEL + c * LANES, acc[r][c]);
    });
}

template <typename E>
void mix_panels(const Batch<E>& b, Tile<E>& t, int count) {
  pack_values(b, t, count);
  for (long i = 0; i < t.rows * CHUNK; i += LANES) store(t.weights + i, load(t.scores + i));
  for (long d = 0; d < t.width; d += PANEL)
    for_row_tiles(t.rows, [&]<int ROWS>(long first) {
      float* sums = t.sums + first * t.width + d;
      V acc[ROWS][2];
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++) acc[r][c] = load(sums + r * t.width + c * LANES);
      multiply_panel<E, ROWS>(acc, t.weights + first * CHUNK, CHUNK, t.packed + d * CHUNK,
                              CHUNK / PanelStep<E>::STEP);
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++) store(sums + r * t.width + c * LANES, acc[r][c]);
    });
}

// Scores of one row, of which it sees [from, to), into weights; its running sums are rescaled.
template <typename E>
void soften(const Batch<E>& b, Tile<E>& t, long row, int from, int to) {
  float* s = t.scores + row * CHUNK;
  if (from >= to) return std::fill(s, s + CHUNK, 0.f);
  std::fill(s, s + from, -INFINITY);
  std::fill(s + to, s + CHUNK, -INFINITY);
  V peak = fill(-INFINITY);
  for (int i = from / LANES * LANES; i < to; i += LANES) {
    V x = load(s + i);
    if (b.softcap > 0)
      x = mul(tanh(mul(x, fill(b.scaling / b.softcap))), fill(b.softcap * LOG2E));
    else
      x = mul(x, fill(b.scaling * LOG2E));
    if (b.softcap > 0 && (i < from || i + LANES > to)) {  // the cap made hidden scores finite
      store(s + i, x);
      for (int k = i; k < i + LANES; k++)
        if (k < from || k >= to) s[k] = -INFINITY;
      x = load(s + i);
    }
    store(s + i, x);
    peak = max(peak, x);
  }
  const float before = t.peak[row], now = std::max(before, highest(peak));
  V total = zero();
  for (int i = 0; i < CHUNK; i += LANES) {
    const V p = exp2(sub(load(s + i), fill(now)));
    store(s + i, p);
    total = add(total, p);
  }
  const float shrink = before == -INFINITY ? 0.f : std::exp2(before - now);
  t.peak[row] = now;
  t.total[row] = t.total[row] * shrink + sum(total);
  if (shrink == 1.f) return;
  float* sums = t.sums + row * t.width;
  for (long d = 0; d < t.width; d += LANES) store(sums + d, mul(load(sums + d), fill(shrink)));
}

template <typename E>
void attend(const Batch<E>& b, const Item& item, Tile<E>& t) {
  const long queries = b.query_start[item.sequence + 1] - b.query_start[item.sequence];
  const long position = b.lengths[item.sequence] - queries + item.first;  // of the first token
  for (long begin = item.key_begin; begin < item.key_end; begin += CHUNK) {
    const int count = int(std::min<long>(CHUNK, item.key_end - begin));
    locate(b, item, t, begin, count);
    if (t.rows > FEW_ROWS)
      score_panels(b, t, count);
    else
      for_row_tiles<FEW_ROWS>(t.rows, [&]<int ROWS>(long r) { score_rows<E, ROWS>(b, t, r, count); });
    for (long r = 0; r < t.rows; r++) {
      const long last = position + r / t.group - begin;  // the last key that the row sees
      const long from = b.n.window > 0 ? std::max<long>(0, last - b.n.window + 1) : 0;
      soften(b, t, r, int(std::min<long>(from, count)), int(std::min<long>(last + 1, count)));
    }
    if (t.rows > FEW_ROWS)
      mix_panels(b, t, count);
    else
      for_row_tiles<FEW_ROWS>(t.rows, [&]<int ROWS>(long r) { mix_rows<E, ROWS>(b, t, r, count); });
  }
}

// Writes one output row from its sums; a sink takes weight and gives nothing.
template <typename E>
void finish(const Batch<E>& b, const Item& item, long row, const float* sums, float peak, float total) {
  const long head = item.kv_head * b.group() + row % b.group();
  const long token = b.query_start[item.sequence] + item.first + row / b.group();
  float factor = 1.f;
  if (b.sinks) {
    const float sink = b.sinks[head] * LOG2E, now = std::max(peak, sink);
    factor = std::exp2(peak - now);
    total = total * factor + std::exp2(sink - now);
  }
  const V scale = fill(factor / total);
  E* out = b.out + (token * b.n.heads + head) * b.n.value_dim;
  for (long d = 0; d < b.n.value_dim; d += LANES)
    store(out + d, mul(load(sums + d, int(b.n.value_dim - d)), scale), int(b.n.value_dim - d));
}

struct Partials {  // of every part: [rows, width + 2]: sums, peak, total
  float* data;
  long rows, width;
  float* row(long part, long r) const { return data + (part * rows + r) * (width + 2); }
};

template <typename E>
void merge(const Batch<E>& b, const Item& item, const Partials& partials) {
  for (long r = 0; r < item.tokens * b.group(); r++) {
    float peak = -INFINITY, total = 0;
    float* first = partials.row(item.part, r);
    for (long p = 0; p < item.parts; p++)
      peak = std::max(peak, partials.row(item.part + p, r)[partials.width]);
    for (long p = 0; p < item.parts; p++) {
      const float* one = partials.row(item.part + p, r);
      const float own = one[partials.width];
      const V scale = fill(own == -INFINITY ? 0.f : std::exp2(own - peak));
      total += one[partials.width + 1] * (own == -INFINITY ? 0.f : std::exp2(own - peak));
      for (long d = 0; d < partials.width; d += LANES)
        store(first + d, fma(load(one + d), scale, p ? load(first + d) : zero()));
    }
    finish(b, item, r, first, peak, total);
  }
}

// What there is to do; the first part of each split item also stands in `merges`.
template <typename E>
long plan(const Batch<E>& b, std::vector<Item>& items, std::vector<Item>& merges) {
  const long tile_tokens = std::max<long>(1, TILE_ROWS / b.group());
  long num_parts = 0;
  for (long s = 0; s < b.n.sequences; s++) {
    const long queries = b.query_start[s + 1] - b.query_start[s], length = b.lengths[s];
    if (length == 0) {  // padding
      const long row = b.n.heads * b.n.value_dim;
      std::memset((void*)(b.out + b.query_start[s] * row), 0, queries * row * sizeof(E));
      continue;
    }
    const long tiles = (queries + tile_tokens - 1) / tile_tokens;
    for (long i = tiles - 1; i >= 0; i--) {  // the last tile sees most keys: the longest work first
      const long first = queries * i / tiles, last = queries * (i + 1) / tiles;
      const long end = length - queries + last;
      const long oldest = length - queries + first - b.n.window + 1;
      const long begin = b.n.window > 0 ? std::max<long>(0, oldest) : 0;
      const long parts = tiles == 1 ? (end - begin + PART_KEYS - 1) / PART_KEYS : 1;
      for (long h = 0; h < b.n.kv_heads; h++) {
        for (long p = 0; p < parts; p++) {
          const long from = begin + (end - begin) * p / parts;
          const long to = begin + (end - begin) * (p + 1) / parts;
          items.push_back({s, h, first, last - first, from, to, parts > 1 ? num_parts + p : -1, parts});
        }
        if (parts > 1) merges.push_back(items[items.size() - parts]);
        num_parts += parts > 1 ? parts : 0;
      }
    }
  }
  return num_parts;
}

template <typename E>
void paged_attention(const Batch<E>& b, int threads) {
  std::vector<Item> items, merges;
  const long num_parts = plan(b, items, merges);
  static thread_local Scratch kept_parts;
  Partials partials{nullptr, 0, round_up(b.n.value_dim, PANEL)};
  for (const Item& item : merges) partials.rows = std::max(partials.rows, item.tokens * b.group());
  partials.data = (float*)kept_parts.reserve(num_parts * partials.rows * (partials.width + 2) * 4 + 64);
  const auto attend_to = [&](const Item& item) {
    static thread_local Scratch scratch;
    Tile<E> t = make_tile(b, item, scratch);
    attend(b, item, t);
    for (long r = 0; r < t.rows; r++) {
      const float* sums = t.sums + r * t.width;
      if (item.part < 0) {
        finish(b, item, r, sums, t.peak[r], t.total[r]);
        continue;
      }
      float* kept = std::copy(sums, sums + t.width, partials.row(item.part, r));
      kept[0] = t.peak[r], kept[1] = t.total[r];
    }
  };
  pool::parallel_for(long(items.size()), threads, [&](long i) { attend_to(items[i]); }, 1);
  pool::parallel_for(long(merges.size()), threads, [&](long i) { merge(b, merges[i], partials); }, 1);
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
