// A tile of few rows (decode) reads keys and values as they lie.
#pragma once

#include <bit>

#include "attention/tile.h"
#include "native/shuffle.h"

namespace attention {

constexpr int ROWS_AT_ONCE = 4;

template <typename E, int ROWS>
void score_rows(const Batch<E>& b, Tile<E>& t, long first) {
  using R = Run<E>;
  constexpr int KEYS = std::bit_floor(unsigned(SUMS / ROWS));
  const E* query = t.query + first * t.depth;
  for (int j = 0; j < t.count; j += KEYS) {
    for (int i = 0; i < KEYS; i++) prefetch_row(t.value[j + i], b.n.value_dim);
    V acc[SUMS];
    for (V& v : acc) v = zero();
    const auto step = [&](long d, auto... left) {
      typename R::type k[KEYS];
      for (int i = 0; i < KEYS; i++) k[i] = R::read(t.key[j + i] + d, left...);
      for (int r = 0; r < ROWS; r++) {
        const auto q = R::read(query + r * t.depth + d);
        for (int i = 0; i < KEYS; i++) acc[r * KEYS + i] = R::dot(acc[r * KEYS + i], q, k[i]);
      }
    };
    long d = 0;
    for (; d + R::WIDTH <= b.n.key_dim; d += R::WIDTH) step(d);
    if (d < b.n.key_dim) step(d, int(b.n.key_dim - d));
    float scores[SUMS];
    store_sums(scores, acc);
    for (int r = 0; r < ROWS; r++)
      std::copy(scores + r * KEYS, scores + (r + 1) * KEYS, t.scores + (first + r) * CHUNK + j);
  }
}

// Adds the chunk's values to the sums of columns d to d + 16 C, of which `left` are there.
template <int ROWS, int C, typename E, typename Mix>
void with_sums(Tile<E>& t, long first, long d, Mix mix) {
  float* sums = t.sums + first * t.width + d;
  V acc[ROWS][C];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(sums + r * t.width + c * LANES);
  mix(acc);
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < C; c++) store(sums + r * t.width + c * LANES, acc[r][c]);
}

template <int ROWS, int C, typename E>
void mix_columns(Tile<E>& t, long first, long d, int left) {
  with_sums<ROWS, C>(t, first, d, [&](V (&acc)[ROWS][C]) {
    for (int j = 0; j < t.count; j++) {
      V v[C];
      for (int c = 0; c < C; c++) {
        // The next chunk's keys travel while this one's values are summed.
        _mm_prefetch((const char*)(t.key[j + AHEAD] + d + c * LANES), _MM_HINT_T1);
        v[c] = left > c * LANES ? load(t.value[j] + d + c * LANES, left - c * LANES) : zero();
      }
      for (int r = 0; r < ROWS; r++) {
        const V weight = fill(t.scores[(first + r) * CHUNK + j]);
        for (int c = 0; c < C; c++) acc[r][c] = fma(weight, v[c], acc[r][c]);
      }
    }
  });
}

#ifdef __AVX512BF16__
// Two keys a step.
template <int ROWS, int C>
void mix_columns(Tile<bf16>& t, long first, long d, int left) {
  with_sums<ROWS, C>(t, first, d, [&](V (&acc)[ROWS][C]) {
    for (int j = 0; j < t.count; j += 2)
      for (int c = 0; c < C; c += 2) {
        const long column = d + c * LANES;
        for (int i = 0; i < 2; i++) _mm_prefetch((const char*)(t.key[j + i + AHEAD] + column), _MM_HINT_T1);
        const Pairs v = interleave(read_line(t.value[j] + column, left - c * LANES),
                                   read_line(t.value[j + 1] + column, left - c * LANES));
        for (int r = 0; r < ROWS; r++) {
          int pair;
          std::memcpy(&pair, t.weights + (first + r) * CHUNK + j, sizeof(pair));
          const __m512bh weights = (__m512bh)_mm512_set1_epi32(pair);
          acc[r][c] = _mm512_dpbf16_ps(acc[r][c], weights, (__m512bh)v.lower);
          acc[r][c + 1] = _mm512_dpbf16_ps(acc[r][c + 1], weights, (__m512bh)v.upper);
        }
      }
  });
}
#endif

template <typename E, int ROWS>
void mix_rows(const Batch<E>& b, Tile<E>& t, long first) {
  for (long d = 0; d < t.width; d += PANEL) {
    const int left = int(b.n.value_dim - d);
    if (left > PANEL)
      mix_columns<ROWS, 4>(t, first, d, left), d += PANEL;
    else
      mix_columns<ROWS, 2>(t, first, d, left);
  }
}

}  // namespace attention
