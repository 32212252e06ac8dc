// Scores of a tile's rows against a chunk of keys, which are read as they lie.
//
// Each is a dot product whose partial sums lie in the lanes of one register: the same order of sums
// whatever the number of rows.
#pragma once

#include <bit>

#include "attention/tile.h"
#include "native/shuffle.h"

namespace attention {

constexpr int ROWS_AT_ONCE = SUMS >= 16 ? 4 : 2;

template <typename E, int ROWS>
void score_rows(const Batch<E>& b, Tile<E>& t, long first) {
  using K = Run<E>;
  using Q = Run<Factor<E>>;
  constexpr int KEYS = std::bit_floor(unsigned(SUMS / ROWS));
  const Factor<E>* query = t.query + first * t.depth;
  const int end = t.end_seen(first + ROWS - 1);
  for (int j = t.first_seen(first, b.n.window) / KEYS * KEYS; j < end; j += KEYS) {
    if (first == 0)
      for (int i = 0; i < KEYS; i++) prefetch_row(t.value[j + i], b.n.value_dim);
    V acc[SUMS];
    for (V& v : acc) v = zero();
    const auto step = [&](long d, auto... left) {
      typename K::type k[KEYS];
      for (int i = 0; i < KEYS; i++) k[i] = K::read(t.key[j + i] + d, left...);
      for (int r = 0; r < ROWS; r++) {
        const auto q = Q::read(query + r * t.depth + d);
        for (int i = 0; i < KEYS; i++) acc[r * KEYS + i] = K::dot(acc[r * KEYS + i], q, k[i]);
      }
    };
    long d = 0;
    for (; d + K::WIDTH <= b.n.key_dim; d += K::WIDTH) step(d);
    if (d < b.n.key_dim) step(d, int(b.n.key_dim - d));
    float scores[SUMS];
    store_sums(scores, acc);
    for (int r = 0; r < ROWS; r++)
      std::copy(scores + r * KEYS, scores + (r + 1) * KEYS, t.scores + (first + r) * CHUNK + j);
  }
}

}  // namespace attention
