// What attention works on: a batch, an item of work in it, and that item's tile of query rows.
#pragma once

#include <algorithm>

#include "native/panel.h"
#include "native/scratch.h"

namespace attention {

using namespace simd;

// Keys are cut at multiples of these numbers, counted from a sequence's first key. So the order in which
// a row's sums are made follows from its position alone, whatever rows are computed beside it.
constexpr int CHUNK = 64;
constexpr int PART_KEYS = 256;  // what is summed by itself, from a peak of its own

constexpr int AHEAD = CHUNK;  // keys that are asked for ahead of their use

struct Sizes {
  int64_t sequences, heads, kv_heads, block_size, key_dim, value_dim;
  int64_t query_token, query_head;          // strides, in elements
  int64_t key_block, key_head, key_token;
  int64_t value_block, value_head, value_token;
  int64_t table_row, window;                // a window of 0: none
};

// What queries and weights are kept as: bfloat16 where that can be multiplied as it is.
#ifdef __AVX512BF16__
template <typename E>
using Factor = E;
#else
template <typename E>
using Factor = float;
#endif

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
  long first, tokens;       // query tokens, counted within the sequence's own
  long key_begin, key_end;  // of all parts, or of one
  long part, parts, merge;  // the item is one of `parts`, which come together in merge number `merge`
  long kept;                // where the rows of the first part's results are kept
};

struct Sums {           // of each row
  float* mixed;         // [rows, width] weighted values
  float *peak, *total;  // [rows] the highest score; the sum of weights, of which the peak's is 1
};

template <typename E>
struct Tile {  // one item at work; arrays lie in the thread's scratch
  long rows, group, depth;  // depth: key_dim rounded up, the stride of `query`
  long width;               // value_dim rounded up, the stride of `mixed`
  long position;            // of the first token
  Factor<E>* query;         // [rows, depth], zeros behind key_dim
  float* scores;            // [rows, CHUNK]
  Factor<E>* weights;       // [rows, CHUNK]
  E* packed;                // one chunk of values in panels
  Sums now, all;            // of the part at work, and of those before it
  long begin;               // the chunk at work: its first key, a multiple of CHUNK,
  int count;                // how many there are,
  const E *key[CHUNK + AHEAD], *value[CHUNK];  // and where; outside the item, one that can be read

  // The keys of the chunk that a row sees: [first_seen, end_seen).
  int end_seen(long row) const {
    return int(std::clamp<long>(position + row / group - begin + 1, 0, count));
  }
  int first_seen(long row, long window) const {
    return window > 0 ? int(std::clamp<long>(position + row / group - begin + 1 - window, 0, count)) : 0;
  }
};

constexpr long round_up(long n, long to) { return (n + to - 1) / to * to; }

inline Sums make_sums(float* memory, long rows, long width) {
  return {memory, memory + rows * width, memory + rows * (width + 1)};
}

inline void clear(const Sums& sums, long rows, long width) {
  std::fill(sums.mixed, sums.mixed + rows * width, 0.f);
  std::fill(sums.peak, sums.peak + rows, -INFINITY);
  std::fill(sums.total, sums.total + rows, 0.f);
}

template <typename E>
void copy_queries(const Batch<E>& b, const Item& item, Tile<E>& t) {
  for (long r = 0; r < t.rows; r++) {
    const long token = b.query_start[item.sequence] + item.first + r / t.group;
    const long head = item.kv_head * t.group + r % t.group;
    const E* query = b.query + token * b.n.query_token + head * b.n.query_head;
    Factor<E>* row = t.query + r * t.depth;
    for (long d = 0; d < t.depth; d += LANES) store(row + d, load(query + d, int(b.n.key_dim - d)));
  }
}

template <typename E>
Tile<E> make_tile(const Batch<E>& b, const Item& item, Scratch& scratch) {
  Tile<E> t;
  t.group = b.group();
  t.rows = item.tokens * t.group;
  t.depth = round_up(b.n.key_dim, 2 * LANES);
  t.width = round_up(b.n.value_dim, PANEL);
  const long queries = b.query_start[item.sequence + 1] - b.query_start[item.sequence];
  t.position = b.lengths[item.sequence] - queries + item.first;
  const long of_sums = t.rows * (t.width + 2);
  const size_t numbers = t.rows * CHUNK + 2 * of_sums, factors = t.rows * (t.depth + CHUNK);
  const size_t bytes = numbers * sizeof(float) + factors * sizeof(Factor<E>) + CHUNK * t.width * sizeof(E);
  t.scores = (float*)scratch.reserve(bytes + 64);
  t.now = make_sums(t.scores + t.rows * CHUNK, t.rows, t.width);
  t.all = make_sums(t.now.mixed + of_sums, t.rows, t.width);
  t.query = (Factor<E>*)(t.all.mixed + of_sums);
  t.weights = t.query + t.rows * t.depth;
  t.packed = (E*)(t.weights + t.rows * CHUNK);
  copy_queries(b, item, t);
  return t;
}

// Takes up the chunk that holds a key: finds the rows of its keys and values from that key on, and of
// some keys behind it, in the blocks. Blocks before that key may be another's by now.
template <typename E>
void locate(const Batch<E>& b, const Item& item, Tile<E>& t, long key, long end) {
  const int64_t* table = b.tables + item.sequence * b.n.table_row;
  const E* keys = b.keys + item.kv_head * b.n.key_head;
  const E* values = b.values + item.kv_head * b.n.value_head;
  t.begin = key / CHUNK * CHUNK, t.count = int(std::min<long>(CHUNK, end - t.begin));
  const int first = int(key - t.begin), found = int(std::min<long>(t.count + AHEAD, item.key_end - t.begin));
  long block = key / b.n.block_size, offset = key % b.n.block_size;
  for (int i = first; i < found; i++) {
    t.key[i] = keys + table[block] * b.n.key_block + offset * b.n.key_token;
    if (i < t.count) t.value[i] = values + table[block] * b.n.value_block + offset * b.n.value_token;
    if (++offset == b.n.block_size) offset = 0, block++;
  }
  std::fill(t.key, t.key + first, t.key[first]);
  std::fill(t.value, t.value + first, t.value[first]);
  std::fill(t.key + found, t.key + CHUNK + AHEAD, t.key[found - 1]);
  std::fill(t.value + t.count, t.value + CHUNK, t.value[t.count - 1]);
}

// Into the second cache: the first one has too few places for what is on its way.
template <typename E>
inline void prefetch_row(const E* row, long columns) {
  for (long d = 0; d < columns; d += 64 / sizeof(E)) _mm_prefetch((const char*)(row + d), _MM_HINT_T1);
}

}  // namespace attention
