// A tall tile of rows (prefill) packs the values of each chunk into panels first. Each sum runs over the
// keys in their order, as in a tile of few rows.
#pragma once

#include "attention/tile.h"
#include "native/shuffle.h"

namespace attention {

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
void mix_panels(const Batch<E>& b, Tile<E>& t) {
  constexpr int STEP = PanelStep<E>::STEP;
  pack_values(b, t);
  for (long d = 0; d < t.width; d += PANEL)
    for_row_tiles(t.rows, [&]<int ROWS>(long first) {
      const int from = t.first_seen(first, b.n.window) / STEP;
      const int to = (t.end_seen(first + ROWS - 1) + STEP - 1) / STEP;
      if (from >= to) return;
      float* sums = t.now.mixed + first * t.width + d;
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
