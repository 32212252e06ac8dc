// A tile of few rows (decode) reads the values as they lie.
#pragma once

#include "attention/scores.h"

namespace attention {

struct Range {
  int from, to;  // keys of the chunk
};

// Adds values to the sums of columns d to d + 16 C.
template <int ROWS, int C, typename E, typename Mix>
void with_sums(Tile<E>& t, long first, long d, Mix mix) {
  float* sums = t.now.mixed + first * t.width + d;
  V acc[ROWS][C];
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < C; c++) acc[r][c] = load(sums + r * t.width + c * LANES);
  mix(acc);
  for (int r = 0; r < ROWS; r++)
    for (int c = 0; c < C; c++) store(sums + r * t.width + c * LANES, acc[r][c]);
}

// Of the columns from d on, `left` are there.
template <int ROWS, int C, typename E>
void mix_columns(Tile<E>& t, Range seen, long first, long d, int left) {
  with_sums<ROWS, C>(t, first, d, [&](V (&acc)[ROWS][C]) {
    for (int j = seen.from; j < seen.to; j++) {
      V v[C];
      for (int c = 0; c < C; c++) {
        // The next chunk's keys travel while this one's values are summed.
        _mm_prefetch((const char*)(t.key[j + AHEAD] + d + c * LANES), _MM_HINT_T1);
        v[c] = left > c * LANES ? load(t.value[j] + d + c * LANES, left - c * LANES) : zero();
      }
      for (int r = 0; r < ROWS; r++) {
        const V weight = fill(t.weights[(first + r) * CHUNK + j]);
        for (int c = 0; c < C; c++) acc[r][c] = fma(weight, v[c], acc[r][c]);
      }
    }
  });
}

#ifdef __AVX512BF16__
// Two keys a step.
template <int ROWS, int C>
void mix_columns(Tile<bf16>& t, Range seen, long first, long d, int left) {
  with_sums<ROWS, C>(t, first, d, [&](V (&acc)[ROWS][C]) {
    for (int j = seen.from / 2 * 2; j < seen.to; j += 2)
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
  const Range seen{t.first_seen(first, b.n.window), t.end_seen(first + ROWS - 1)};
  for (long d = 0; d < t.width; d += PANEL) {
    const int left = int(b.n.value_dim - d);
    if (left > PANEL)
      mix_columns<ROWS, 4>(t, seen, first, d, left), d += PANEL;
    else
      mix_columns<ROWS, 2>(t, seen, first, d, left);
  }
}

}  // namespace attention
