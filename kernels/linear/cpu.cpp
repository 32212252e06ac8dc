// y = x W^T + bias over a weight that is packed in panels of 32 output columns.

#include "native/row_tiles.h"
#include "native/scratch.h"

using namespace simd;

namespace {

// Writes one tile's 32 columns, rounded once, as far as they exist.
template <int ROWS, typename E>
void finish(V (&acc)[ROWS][2], const float* bias, E* y, long y_stride, int columns) {
  for (int c = 0; c < 2; c++) {
    const int n = columns - c * LANES;
    if (n <= 0) return;
    const V b = bias ? load(bias + c * LANES, n) : zero();
    for (int t = 0; t < ROWS; t++) store(y + t * y_stride + c * LANES, add(acc[t][c], b), n);
  }
}

template <typename E>
struct Linear {
  static constexpr int STEP = PanelStep<E>::STEP;
  const E* weight;    // [ceil(N / 32)][K / STEP][32][STEP]
  const float* bias;  // [N] or null
  E* y;
  long N, K, y_stride;
};

// Rows t to t + ROWS of y, in the columns of panel p. PACKED: x is [K / STEP][ROWS][STEP], else
// [ROWS][x_stride].
template <int ROWS, bool PACKED, typename E>
void multiply(const Linear<E>& to, long p, long t, const E* x, long x_stride) {
  constexpr int STEP = Linear<E>::STEP;
  V acc[ROWS][2];
  for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = zero();
  multiply_panel<E, ROWS>(acc, x, PACKED ? STEP : x_stride, to.weight + p * to.K * PANEL, to.K / STEP,
                          PACKED ? ROWS * STEP : STEP);
  finish<ROWS>(acc, to.bias ? to.bias + p * PANEL : nullptr, to.y + t * to.y_stride + p * PANEL,
               to.y_stride, int(std::min<long>(PANEL, to.N - p * PANEL)));
}

template <typename E>
void linear(const Linear<E>& to, const E* x, long T, long x_stride, int threads) {
  const long row_bytes = to.K * sizeof(E);
  if (T <= FEW_ROWS) {
    for_tiles_and_panels(T, to.N, row_bytes, threads, [&]<int ROWS>(long p, long t) {
      multiply<ROWS, false>(to, p, t, x + t * x_stride, x_stride);
    });
    return;
  }
  static thread_local Scratch scratch;
  E* packed = (E*)scratch.reserve(T * row_bytes + 64);
  constexpr int STEP = Linear<E>::STEP;
  pack_tiles((const Word*)x, x_stride / STEP, T, to.K / STEP, (Word*)packed, threads);
  for_tiles_and_panels(T, to.N, row_bytes, threads, [&]<int ROWS>(long p, long t) {
    multiply<ROWS, true>(to, p, t, packed + t * to.K, STEP);
  });
}

template <typename E>
void pack_panels(const E* weight, long stride, E* panels, long N, long K, int threads) {
  constexpr int STEP = Linear<E>::STEP;
  pool::parallel_for((N + PANEL - 1) / PANEL, threads, [&](long p) {
    const long rows = std::min<long>(PANEL, N - p * PANEL);
    Word* panel = (Word*)(panels + p * PANEL * K);
    if (rows < PANEL) std::memset((void*)panel, 0, PANEL * K * sizeof(E));
    interleave((const Word*)(weight + p * PANEL * stride), stride / STEP, rows, K / STEP, panel, PANEL);
  });
}

template <typename E>
void packed_rows(const E* weight, const int64_t* ids, E* y, long T, long K, long columns, int threads) {
  constexpr int STEP = Linear<E>::STEP;
  pool::parallel_for(T, threads, [&](long t) {
    const E* row = weight + ids[t] / PANEL * K * PANEL + ids[t] % PANEL * STEP;
    for (long k = 0; k < columns; k++) y[t * columns + k] = row[k / STEP * PANEL * STEP + k % STEP];
  });
}

}  // namespace

// A number of bfloat16 takes half a word: K, and the strides of x and of a weight, are even.
//
// linear: x [T, K], weight [ceil(N / 32)][K / STEP][32][STEP], bias [N] or null, y [T, N].
// pack_panels: a weight [N, K] with adjacent columns -> panels.
// packed_rows: y[t] = the first `columns` numbers of row ids[t] of a packed weight.
#define LORAPLEX_LINEAR(E, NAME)                                                                         \
  extern "C" void lpx_linear_##NAME(const E* x, const E* weight, const float* bias, E* y, long T, long N, \
                                    long K, long x_stride, long y_stride, int threads) {                 \
    linear<E>({weight, bias, y, N, K, y_stride}, x, T, x_stride, threads);                               \
  }                                                                                                      \
  extern "C" void lpx_pack_panels_##NAME(const E* weight, long stride, E* panels, long N, long K,        \
                                         int threads) {                                                  \
    pack_panels(weight, stride, panels, N, K, threads);                                                  \
  }                                                                                                      \
  extern "C" void lpx_packed_rows_##NAME(const E* weight, const int64_t* ids, E* y, long T, long K,      \
                                         long columns, int threads) {                                    \
    packed_rows(weight, ids, y, T, K, columns, threads);                                                 \
  }

LORAPLEX_LINEAR(float, float)
LORAPLEX_LINEAR(bf16, bf16)
