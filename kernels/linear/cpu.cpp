// y = x W^T + bias over a weight that is packed in panels of 32 output columns.

#include "native/panel.h"
#include "native/pool.h"

using namespace simd;

namespace {

// Writes one tile's 32 columns, rounded once, as far as they exist.
template <int ROWS>
void finish(V (&acc)[ROWS][2], const float* bias, bf16* y, long y_stride, int columns) {
  for (int c = 0; c < 2; c++) {
    const int n = columns - c * LANES;
    if (n <= 0) return;
    const V b = bias ? load(bias + c * LANES, n) : zero();
    for (int t = 0; t < ROWS; t++) store(y + t * y_stride + c * LANES, add(acc[t][c], b), n);
  }
}

}  // namespace

// x [T, K] with K even, weight [ceil(N / 32)][K / 2][32][2], bias [N] or null, y [T, N].
extern "C" void lpx_linear_bf16(const bf16* x, const bf16* weight, const float* bias, bf16* y, long T,
                                long N, long K, long x_stride, long y_stride, int threads) {
  const long panels = (N + PANEL - 1) / PANEL;
  pool::parallel_for(panels, threads, [&](long p) {
    const int columns = int(N - p * PANEL < PANEL ? N - p * PANEL : PANEL);
    for_row_tiles(T, [&]<int ROWS>(long t) {
      V acc[ROWS][2];
      for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = zero();
      multiply_panel<bf16, ROWS>(acc, x + t * x_stride, x_stride, weight + p * K * PANEL, K / 2);
      finish<ROWS>(acc, bias ? bias + p * PANEL : nullptr, y + t * y_stride + p * PANEL, y_stride,
                   columns);
    });
  });
}

// y[t] = the first `columns` numbers of row ids[t] of a packed weight, whose K is padded to even.
extern "C" void lpx_packed_rows_bf16(const bf16* weight, const int64_t* ids, bf16* y, long T, long K,
                                     long columns, int threads) {
  pool::parallel_for(T, threads, [&](long t) {
    const bf16* row = weight + ids[t] / PANEL * K * PANEL + ids[t] % PANEL * 2;
    for (long k = 0; k < columns; k++) y[t * columns + k] = row[k / 2 * PANEL * 2 + k % 2];
  });
}
