// A tall tile of rows (prefill) packs each chunk into panels first.
#pragma once

#include <type_traits>

#include "attention/tile.h"
#include "native/shuffle.h"

namespace attention {

template <typename E>
using Word = std::conditional_t<sizeof(E) == 2, uint32_t, float>;  // one step of a panel's column

#ifdef LORAPLEX_AVX512

// Sixteen keys at a time: words k to k + 16 of each become the columns of as many lines.
template <typename E>
void pack_keys(const Batch<E>& b, Tile<E>& t) {
  constexpr int STEP = PanelStep<E>::STEP;
  const long steps = t.depth / STEP;
  for (int j = 0; j < CHUNK; j += LANES)
    for (long k = 0; k < steps; k += LANES) {
      __m512i words[LANES];
      for (int i = 0; i < LANES; i++)
        words[i] = read_line(t.key[std::min(j + i, t.count - 1)] + k * STEP, b.n.key_dim - k * STEP);
      transpose(words);
      Word<E>* out = (Word<E>*)t.packed + (j / PANEL * steps + k) * PANEL + j % PANEL;
      for (int i = 0; i < LANES; i++) _mm512_storeu_si512(out + i * PANEL, words[i]);
    }
}

#else

template <typename E>
void pack_keys(const Batch<E>& b, Tile<E>& t) {
  constexpr int STEP = PanelStep<E>::STEP;
  const long steps = t.depth / STEP, whole = b.n.key_dim / STEP;
  for (int j = 0; j < CHUNK; j++) {
    Word<E>* out = (Word<E>*)t.packed + j / PANEL * steps * PANEL + j % PANEL;
    const E* key = t.key[std::min(j, t.count - 1)];
    for (long k = 0; k < whole; k++) std::memcpy(out + k * PANEL, key + k * STEP, sizeof(Word<E>));
    for (long k = whole; k < steps; k++) {
      Word<E> last = 0;
      if (k * STEP < b.n.key_dim) std::memcpy(&last, key + k * STEP, sizeof(E));  // half of a pair
      out[k * PANEL] = last;
    }
  }
}

#endif

// Value dimensions as columns: [width / 32][CHUNK / STEP][32][STEP]; what is not there is zero.
template <typename E>
void pack_values(const Batch<E>& b, Tile<E>& t) {
  for (long d = 0; d < t.width; d += LANES)
    for (int j = 0; j < CHUNK; j++) {
      const int left = int(b.n.value_dim - d);
      const V v = left > 0 ? load(t.value[j] + d, left) : zero();
      store(t.packed + d / PANEL * CHUNK * PANEL + j * PANEL + d % PANEL, v);
    }
}

template <>
void pack_values(const Batch<bf16>& b, Tile<bf16>& t) {
  for (int j = 0; j < CHUNK; j += 2)
    for (long d = 0; d < t.width; d += PANEL) {
      uint32_t* out = (uint32_t*)t.packed + d * (CHUNK / 2) + j / 2 * PANEL;
      const long left = std::min<long>(PANEL, b.n.value_dim - d);
#ifdef LORAPLEX_AVX512
      const Pairs v = interleave(read_line(t.value[j] + d, left), read_line(t.value[j + 1] + d, left));
      _mm512_storeu_si512(out, v.lower);
      _mm512_storeu_si512(out + LANES, v.upper);
#else
      for (int i = 0; i < PANEL; i++)
        out[i] = i < left ? t.value[j][d + i].bits | uint32_t(t.value[j + 1][d + i].bits) << 16 : 0;
#endif
    }
}

template <typename E>
void score_panels(const Batch<E>& b, Tile<E>& t) {
  pack_keys(b, t);
  const long steps = t.depth / PanelStep<E>::STEP;
  for (int p = 0; p * PANEL < t.count; p++)
    for_row_tiles(t.rows, [&]<int ROWS>(long first) {
      if (p * PANEL >= t.end_seen(first + ROWS - 1)) return;
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
void mix_panels(const Batch<E>& b, Tile<E>& t) {
  constexpr int STEP = PanelStep<E>::STEP;
  pack_values(b, t);
  for (long d = 0; d < t.width; d += PANEL)
    for_row_tiles(t.rows, [&]<int ROWS>(long first) {
      const int from = t.first_seen(first, b.n.window) / STEP;
      const int to = (t.end_seen(first + ROWS - 1) + STEP - 1) / STEP;
      if (from >= to) return;
      float* sums = t.sums + first * t.width + d;
      V acc[ROWS][2];
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++) acc[r][c] = load(sums + r * t.width + c * LANES);
      multiply_panel<E, ROWS>(acc, t.weights + first * CHUNK + from * STEP, CHUNK,
                              t.packed + d * CHUNK + from * STEP * PANEL, to - from);
      for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < 2; c++) store(sums + r * t.width + c * LANES, acc[r][c]);
    });
}

}  // namespace attention
