// y = x W^T + bias over a weight that is packed in panels of 32 output columns.

#include "native/row_tiles.h"
#include "native/scratch.h"

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

struct Linear {
  const bf16* weight;  // [ceil(N / 32)][K / 2][32][2]
  const float* bias;   // [N] or null
  bf16* y;
  long N, K, y_stride;
};

// Rows t to t + ROWS of y, in the columns of panel p. PACKED: x is [K / 2][ROWS][2], else [ROWS][x_stride].
template <int ROWS, bool PACKED>
void multiply(const Linear& to, long p, long t, const bf16* x, long x_stride) {
  V acc[ROWS][2];
  for (int i = 0; i < ROWS; i++) acc[i][0] = acc[i][1] = zero();
  multiply_panel<bf16, ROWS>(acc, x, PACKED ? 2 : x_stride, to.weight + p * to.K * PANEL, to.K / 2,
                             PACKED ? ROWS * 2 : 2);
  finish<ROWS>(acc, to.bias ? to.bias + p * PANEL : nullptr, to.y + t * to.y_stride + p * PANEL,
               to.y_stride, int(std::min<long>(PANEL, to.N - p * PANEL)));
}

}  // namespace

// x [T, K] with K and x_stride even, weight [ceil(N / 32)][K / 2][32][2], bias [N] or null, y [T, N].
extern "C" void lpx_linear_bf16(const bf16* x, const bf16* weight, const float* bias, bf16* y, long T,
                                long N, long K, long x_stride, long y_stride, int threads) {
  const Linear to{weight, bias, y, N, K, y_stride};
  const long row_bytes = K * sizeof(bf16);
  if (T <= FEW_ROWS) {
    for_tiles_and_panels(T, N, row_bytes, threads, [&]<int ROWS>(long p, long t) {
      multiply<ROWS, false>(to, p, t, x + t * x_stride, x_stride);
    });
    return;
  }
  static thread_local Scratch scratch;
  bf16* packed = (bf16*)scratch.reserve(T * row_bytes + 64);
  pack_tiles((const Word*)x, x_stride / 2, T, K / 2, (Word*)packed, threads);
  for_tiles_and_panels(T, N, row_bytes, threads, [&]<int ROWS>(long p, long t) {
    multiply<ROWS, true>(to, p, t, packed + t * K, 2);
  });
}

// A weight [N, K] with K even and adjacent columns -> panels.
extern "C" void lpx_pack_panels_bf16(const bf16* weight, long stride, bf16* panels, long N, long K,
                                     int threads) {
  pool::parallel_for((N + PANEL - 1) / PANEL, threads, [&](long p) {
    const long rows = std::min<long>(PANEL, N - p * PANEL);
    Word* panel = (Word*)(panels + p * PANEL * K);
    if (rows < PANEL) std::memset(panel, 0, PANEL * K * sizeof(bf16));
    interleave((const Word*)(weight + p * PANEL * stride), stride / 2, rows, K / 2, panel, PANEL);
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
