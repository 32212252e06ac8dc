// The heart of every matrix product here: some rows of x against a panel of 32 columns.
//
// A panel holds 32 columns as [K / STEP][32][STEP]: the STEP numbers of a column that one instruction
// takes lie together. K is padded with zeros to a multiple of STEP.
#pragma once

#include "simd.h"

namespace simd {

constexpr int PANEL = 32;

#ifdef LORAPLEX_AVX512
constexpr int PANEL_ROWS = 12;  // 24 of 32 registers accumulate
#else
constexpr int PANEL_ROWS = 3;  // 12 of 16
#endif

template <typename E>
struct PanelStep;

template <>
struct PanelStep<float> {
  static constexpr int STEP = 1;
  template <int ROWS>
  static void run(V (&acc)[ROWS][2], const float* x, long x_stride, const float* w) {
    const V w0 = load(w), w1 = load(w + LANES);
    for (int t = 0; t < ROWS; t++) {
      const V a = fill(x[t * x_stride]);
      acc[t][0] = fma(w0, a, acc[t][0]);
      acc[t][1] = fma(w1, a, acc[t][1]);
    }
  }
};

template <>
struct PanelStep<bf16> {
  static constexpr int STEP = 2;
#ifdef __AVX512BF16__
  template <int ROWS>
  static void run(V (&acc)[ROWS][2], const bf16* x, long x_stride, const bf16* w) {
    const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w);
    const __m512bh w1 = (__m512bh)_mm512_loadu_si512(w + 2 * LANES);
    for (int t = 0; t < ROWS; t++) {
      int pair;
      std::memcpy(&pair, x + t * x_stride, 4);
      const __m512bh a = (__m512bh)_mm512_set1_epi32(pair);
      acc[t][0] = _mm512_dpbf16_ps(acc[t][0], w0, a);
      acc[t][1] = _mm512_dpbf16_ps(acc[t][1], w1, a);
    }
  }
#endif
  template <int ROWS, typename X>
  static void run(V (&acc)[ROWS][2], const X* x, long x_stride, const bf16* w) {
    for (int c = 0; c < 2; c++) {
      const V w0 = even(w + c * 2 * LANES), w1 = odd(w + c * 2 * LANES);
      for (int t = 0; t < ROWS; t++) {
        const X* a = x + t * x_stride;
        acc[t][c] = fma(w0, fill(to_float(a[0])), acc[t][c]);
        acc[t][c] = fma(w1, fill(to_float(a[1])), acc[t][c]);
      }
    }
  }
};

// Asks for the panel's memory ahead of its use. Measured on Zen 4, where any other choice costs 10 to 30 %
// at some number of rows: the less there is to compute, the less time a line has to come, and what comes
// into the nearest cache too early is gone when it is needed.
template <int ROWS>
inline void prefetch_ahead(const void* now, long step_bytes) {
  const char* ahead = (const char*)now + (ROWS < 6 ? 32 : 64) * step_bytes;
  for (long line = 0; line < step_bytes; line += 64) {
    if constexpr (ROWS >= 3 && ROWS <= 5)
      _mm_prefetch(ahead + line, _MM_HINT_T0);
    else
      _mm_prefetch(ahead + line, _MM_HINT_T1);
  }
}

// acc[t][:] += x[t, :] . panel, over `steps` steps of K; step k of row t begins at t x_stride + k x_step.
template <typename E, int ROWS, typename X>
inline void multiply_panel(V (&acc)[ROWS][2], const X* x, long x_stride, const E* panel, long steps,
                           long x_step = PanelStep<E>::STEP) {
  constexpr int STEP = PanelStep<E>::STEP;
  for (long k = 0; k < steps; k++) {
    const E* w = panel + k * PANEL * STEP;
    prefetch_ahead<ROWS>(w, PANEL * STEP * sizeof(E));
    PanelStep<E>::template run<ROWS>(acc, x + k * x_step, x_stride, w);
  }
}

// Calls body<ROWS>(first row) over tiles of at most MAX rows, of nearly equal height.
template <int ROWS, typename Body>
inline void call_with_rows(int rows, long first, Body& body) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return call_with_rows<ROWS - 1>(rows, first, body);
  }
  body.template operator()<ROWS>(first);
}

template <int MAX = PANEL_ROWS, typename Body>
inline void for_row_tiles(long rows, Body body) {
  const long tiles = (rows + MAX - 1) / MAX;
  for (long i = 0; i < tiles; i++) {
    const long first = rows * i / tiles, last = rows * (i + 1) / tiles;
    call_with_rows<MAX>(int(last - first), first, body);
  }
}

}  // namespace simd
