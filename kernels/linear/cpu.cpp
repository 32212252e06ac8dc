// y = x W^T + bias over a weight that is packed in panels of 32 output columns.

#include "native/panel.h"
#include "native/pool.h"
#include "native/scratch.h"

using namespace simd;

namespace {

constexpr long FEW_ROWS = 8;            // that are read where they are
constexpr long BLOCK_BYTES = 384 << 10;  // of x, beside a panel of weights in the second cache

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

void multiply_few(const Linear& to, const bf16* x, long x_stride, long T, int threads) {
  pool::parallel_for((to.N + PANEL - 1) / PANEL, threads, [&](long p) {
    for_row_tiles(T, [&]<int ROWS>(long t) {
      multiply<ROWS, false>(to, p, t, x + t * x_stride, x_stride);
    });
  });
}

// x [4][x_stride], its first 8 columns -> out [4 pairs][out_stride], the pairs of the four rows together.
inline void interleave_four(const bf16* x, long x_stride, bf16* out, long out_stride) {
  const auto row = [&](long i) { return _mm_loadu_ps((const float*)(x + i * x_stride)); };
  __m128 a = row(0), b = row(1), c = row(2), d = row(3);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps((float*)out, a);
  _mm_storeu_ps((float*)(out + out_stride), b);
  _mm_storeu_ps((float*)(out + 2 * out_stride), c);
  _mm_storeu_ps((float*)(out + 3 * out_stride), d);
}

// x [rows, K] -> out [K / 2][rows][2]
void interleave(const bf16* x, long x_stride, long rows, long K, bf16* out) {
  const long whole = rows < 4 ? 0 : K - K % 8;
  for (long k = 0; k < whole; k += 8)
    for (long i = 0; i < rows; i += 4) {
      const long four = std::min(i, rows - 4);
      interleave_four(x + four * x_stride + k, x_stride, out + k * rows + four * 2, rows * 2);
    }
  for (long k = whole; k < K; k += 2)
    for (long i = 0; i < rows; i++) std::memcpy(out + k * rows + i * 2, x + i * x_stride + k, 4);
}

// Copies x into tiles of [K / 2][rows of the tile][2], which are read in the order in which they lie. Read
// where they are, rows that lie a large power of two apart push each other out of the cache.
void pack_rows(const bf16* x, long x_stride, long T, long K, bf16* packed, int threads) {
  const long tiles = (T + PANEL_ROWS - 1) / PANEL_ROWS;
  pool::parallel_for(tiles, threads, [&](long tile) {
    const long first = T * tile / tiles, rows = T * (tile + 1) / tiles - first;
    interleave(x + first * x_stride, x_stride, rows, K, packed + first * K);
  });
}

// A block of rows that stays in the second cache meets one panel after the other.
void multiply_many(const Linear& to, const bf16* x, long x_stride, long T, int threads) {
  static thread_local Scratch scratch;
  bf16* packed = (bf16*)scratch.reserve(T * to.K * sizeof(bf16) + 64);
  pack_rows(x, x_stride, T, to.K, packed, threads);
  const long tiles = (T + PANEL_ROWS - 1) / PANEL_ROWS, panels = (to.N + PANEL - 1) / PANEL;
  const long blocks = (T * to.K * long(sizeof(bf16)) + BLOCK_BYTES - 1) / BLOCK_BYTES;
  pool::parallel_for(blocks * panels, threads, [&](long i) {
    const long block = i / panels, p = i % panels;
    for (long tile = tiles * block / blocks; tile < tiles * (block + 1) / blocks; tile++) {
      const long first = T * tile / tiles, rows = T * (tile + 1) / tiles - first;
      const auto body = [&]<int ROWS>(long t) {
        multiply<ROWS, true>(to, p, t, packed + t * to.K, 2);
      };
      call_with_rows<PANEL_ROWS>(int(rows), first, body);
    }
  });
}

}  // namespace

// x [T, K] with K even, weight [ceil(N / 32)][K / 2][32][2], bias [N] or null, y [T, N].
extern "C" void lpx_linear_bf16(const bf16* x, const bf16* weight, const float* bias, bf16* y, long T,
                                long N, long K, long x_stride, long y_stride, int threads) {
  const Linear to{weight, bias, y, N, K, y_stride};
  if (T > FEW_ROWS)
    multiply_many(to, x, x_stride, T, threads);
  else
    multiply_few(to, x, x_stride, T, threads);
}

// y[t] = the first `columns` numbers of row ids[t] of a packed weight, whose K is padded to even.
extern "C" void lpx_packed_rows_bf16(const bf16* weight, const int64_t* ids, bf16* y, long T, long K,
                                     long columns, int threads) {
  pool::parallel_for(T, threads, [&](long t) {
    const bf16* row = weight + ids[t] / PANEL * K * PANEL + ids[t] % PANEL * 2;
    for (long k = 0; k < columns; k++) y[t * columns + k] = row[k / 2 * PANEL * 2 + k % 2];
  });
}
