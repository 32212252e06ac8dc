// What attention works on: a batch, an item of work in it, and that item's tile of query rows.
#pragma once

#include <algorithm>

#include "native/panel.h"
#include "native/scratch.h"

namespace attention {

using namespace simd;

constexpr int CHUNK = 64;     // keys
constexpr int AHEAD = CHUNK;  // keys that are asked for ahead of their use

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
  long first, tokens;       // query tokens, counted within the sequence's own
  long key_begin, key_end;
  long part, parts, merge;  // the item is one of `parts`, which come together in merge number `merge`
  long kept;                // where the rows of the first part's results are kept
};

template <typename E>
struct Tile {  // one item at work; arrays lie in the thread's scratch
  long rows, group, depth;  // depth: key_dim rounded up, the stride of `query`
  long width;               // value_dim rounded up, the stride of `sums`
  long position;            // of the first token
  E* query;                 // [rows, depth], zeros behind key_dim
  float* scores;            // [rows, CHUNK]; then the weights, of which the peak's is 1,
  E* weights;               // [rows, CHUNK], and the same as E
  E* packed;                // one chunk of keys or of values in panels
  float* sums;              // [rows, width]
  float *peak, *total;      // [rows]
  long begin;               // the chunk at work: its first key,
  int count;                // how many there are,
  const E *key[CHUNK + AHEAD], *value[CHUNK];  // and where; behind `count`, one that can be read

  // The keys of the chunk that a row sees: [first_seen, end_seen).
  int end_seen(long row) const {
    return int(std::clamp<long>(position + row / group - begin + 1, 0, count));
  }
  int first_seen(long row, long window) const {
    return window > 0 ? int(std::clamp<long>(position + row / group - begin + 1 - window, 0, count)) : 0;
  }
};

constexpr long round_up(long n, long to) { return (n + to - 1) / to * to; }

template <typename E>
Tile<E> make_tile(const Batch<E>& b, const Item& item, Scratch& scratch) {
  Tile<E> t;
  t.group = b.group();
  t.rows = item.tokens * t.group;
  t.depth = round_up(b.n.key_dim, 2 * LANES);
  t.width = round_up(b.n.value_dim, PANEL);
  const long queries = b.query_start[item.sequence + 1] - b.query_start[item.sequence];
  t.position = b.lengths[item.sequence] - queries + item.first;
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
    std::memcpy((void*)row, b.query + token * b.n.query_token + head * b.n.query_head,
                b.n.key_dim * sizeof(E));
    std::memset((void*)(row + b.n.key_dim), 0, (t.depth - b.n.key_dim) * sizeof(E));
  }
  return t;
}

// Takes up the chunk that begins at a key: finds the rows of its keys and values, and of some keys
// behind it, in the blocks.
template <typename E>
void locate(const Batch<E>& b, const Item& item, Tile<E>& t, long begin) {
  const int64_t* table = b.tables + item.sequence * b.n.table_row;
  const E* keys = b.keys + item.kv_head * b.n.key_head;
  const E* values = b.values + item.kv_head * b.n.value_head;
  t.begin = begin, t.count = int(std::min<long>(CHUNK, item.key_end - begin));
  const int found = int(std::min<long>(t.count + AHEAD, item.key_end - begin));
  long block = begin / b.n.block_size, offset = begin % b.n.block_size;
  for (int i = 0; i < found; i++) {
    t.key[i] = keys + table[block] * b.n.key_block + offset * b.n.key_token;
    if (i < t.count) t.value[i] = values + table[block] * b.n.value_block + offset * b.n.value_token;
    if (++offset == b.n.block_size) offset = 0, block++;
  }
  std::fill(t.key + found, t.key + CHUNK + AHEAD, t.key[found - 1]);
  std::fill(t.value + t.count, t.value + CHUNK, t.value[t.count - 1]);
}

// Into the second cache: the first one has too few places for what is on its way.
template <typename E>
inline void prefetch_row(const E* row, long columns) {
  for (long d = 0; d < columns; d += 64 / sizeof(E)) _mm_prefetch((const char*)(row + d), _MM_HINT_T1);
}

}  // namespace attention
