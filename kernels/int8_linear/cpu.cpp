// y = x W^T + bias with eight-bit weights and activations: integer sums over groups of 64 inputs, put
// together in float32.
//
// A weight's integers have one scale for each output column. A row of x is rounded to integers here, with
// one scale for each group. They are kept with 128 added, since the instruction takes one operand without
// sign; what that adds to each sum is known beforehand, and the sums start from its negative.

#include "native/integers.h"
#include "native/row_tiles.h"
#include "native/scratch.h"

using namespace simd;

namespace {

constexpr long GROUP = 64;  // inputs
constexpr long STEP = 4;    // inputs of one lane of a product
constexpr int MAX_ROWS = std::min(PANEL_ROWS, 8);  // beside two kinds of sums, more do not fit

struct Weight {
  const int8_t* panels;    // [ceil(N / 32)][K / 4][32][4]
  const int32_t* offsets;  // [ceil(N / 32)][groups][32]: -128 x the sum of the column's integers
  const float* scales;     // [ceil(N / 32) * 32]
  long N, K;

  long groups() const { return (K + GROUP - 1) / GROUP; }
};

// ---- the activations

// x [count <= 64] -> integers + 128, padded to `padded` with 128; returns their scale, which is NaN if
// not all of x is finite.
float quantise(const bf16* x, long count, long padded, uint8_t* out) {
  V peak = zero(), odd = zero();
  for (long k = 0; k < count; k += LANES) {
    const V v = load(x + k, int(count - k));
    peak = max(peak, max(v, sub(zero(), v))), odd = add(odd, sub(v, v));
  }
  const float greatest = highest(peak);
  const V scale = fill(greatest > 0 ? 127.f / greatest : 0.f);
  for (long k = 0; k < padded; k += LANES) {
    alignas(16) uint8_t bytes[LANES];
    const V whole = round(mul(load(x + k, int(count - k)), scale));
    store_bytes(bytes, add(min(max(whole, fill(-127.f)), fill(127.f)), fill(128.f)));
    std::memcpy(out + k, bytes, std::min<long>(LANES, padded - k));
  }
  return sum(odd) == 0 ? greatest / 127.f : NAN;
}

struct Activations {
  uint8_t* rows;  // [T][K]
  float* scales;  // [T][groups]
};

void quantise_rows(const bf16* x, long x_stride, long T, long columns, const Weight& w,
                   const Activations& out, int threads) {
  const long groups = w.groups();
  pool::parallel_for(T, threads, [&](long t) {
    for (long g = 0; g < groups; g++) {
      const long k = g * GROUP, padded = std::min(GROUP, w.K - k);
      out.scales[t * groups + g] =
          quantise(x + t * x_stride + k, std::min(padded, columns - k), padded, out.rows + t * w.K + k);
    }
  });
}

// ---- the product

// sums[t][:] += x[t, group] . panel, `steps` steps. PACKED: x is [steps][ROWS][4], else [ROWS][x_stride].
template <int ROWS, bool PACKED>
inline void multiply_group(V (&sums)[ROWS][2], const uint8_t* x, long x_stride, const float* scales,
                           long scale_stride, const int8_t* panel, const int32_t* offsets, long steps) {
  I acc[ROWS][2];  // in registers, if every loop over it is unrolled
#pragma GCC unroll 16
  for (int t = 0; t < ROWS; t++)
    acc[t][0] = load_ints(offsets), acc[t][1] = load_ints(offsets + LANES);
  for (long k = 0; k < steps; k++) {
    const int8_t* now = panel + k * PANEL * STEP;
    prefetch_ahead<ROWS>(now, PANEL * STEP);
    const I w0 = load_ints(now), w1 = load_ints(now + LANES * STEP);
#pragma GCC unroll 16
    for (int t = 0; t < ROWS; t++) {
      int four;
      std::memcpy(&four, PACKED ? x + (k * ROWS + t) * STEP : x + t * x_stride + k * STEP, 4);
      const I a = fill_ints(four);
      acc[t][0] = dot_bytes(acc[t][0], a, w0);
      acc[t][1] = dot_bytes(acc[t][1], a, w1);
    }
  }
#pragma GCC unroll 16
  for (int t = 0; t < ROWS; t++) {
    const V scale = fill(scales[t * scale_stride]);
    for (int c = 0; c < 2; c++) sums[t][c] = fma(to_floats(acc[t][c]), scale, sums[t][c]);
  }
}

struct Output {
  const float* bias;  // [N] or null
  bf16* y;
  long stride;
};

// Rows t to t + ROWS of y, in the columns of panel p. PACKED: x is [K / 4][ROWS][4], else [ROWS][K].
template <int ROWS, bool PACKED>
void multiply(const Weight& w, const Output& out, long p, long t, const uint8_t* x, const float* scales) {
  const long groups = w.groups(), x_step = PACKED ? ROWS * STEP : STEP;
  V sums[ROWS][2];
  for (int i = 0; i < ROWS; i++) sums[i][0] = sums[i][1] = zero();
  for (long g = 0; g < groups; g++) {
    const long k = g * (GROUP / STEP), steps = std::min(GROUP / STEP, w.K / STEP - k);
    multiply_group<ROWS, PACKED>(sums, x + k * x_step, w.K, scales + g, groups,
                                 w.panels + (p * w.K + k * STEP) * PANEL,
                                 w.offsets + (p * groups + g) * PANEL, steps);
  }
  for (int c = 0; c < 2; c++) {
    const long column = p * PANEL + c * LANES;
    const int n = int(w.N - column);
    if (n <= 0) return;
    const V scale = load(w.scales + column), bias = out.bias ? load(out.bias + column, n) : zero();
    for (int i = 0; i < ROWS; i++)
      store(out.y + (t + i) * out.stride + column, fma(sums[i][c], scale, bias), n);
  }
}

// ---- the weights

// One row of a weight to integers from -127 to 127; returns their scale.
float quantise_weight(const bf16* w, long count, int8_t* out) {
  V peak = zero();
  for (long k = 0; k < count; k += LANES) {
    const V v = load(w + k, int(count - k));
    peak = max(peak, max(v, sub(zero(), v)));
  }
  const float greatest = highest(peak), scale = greatest > 0 ? 127.f / greatest : 0.f;
  for (long k = 0; k < count; k++) out[k] = int8_t(std::nearbyint(to_float(w[k]) * scale));
  return greatest / 127.f;
}

}  // namespace

// x [T, columns], y [T, N], bias [N] or null; columns is at most K, which is a multiple of 4.
extern "C" void lpx_int8_linear(const bf16* x, long x_stride, long columns, const int8_t* panels,
                                const int32_t* offsets, const float* scales, const float* bias, bf16* y,
                                long T, long N, long K, int threads) {
  static thread_local Scratch scratch;
  const Weight w{panels, offsets, scales, N, K};
  const Output out{bias, y, N};
  const long bytes = (T * K + 63) / 64 * 64;
  uint8_t* rows = (uint8_t*)scratch.reserve(2 * bytes + T * w.groups() * sizeof(float) + 64);
  const Activations quantised{rows, (float*)(rows + 2 * bytes)};
  quantise_rows(x, x_stride, T, columns, w, quantised, T <= FEW_ROWS ? 1 : threads);
  const float* row_scales = quantised.scales;
  if (T <= FEW_ROWS) {
    for_tiles_and_panels<MAX_ROWS>(T, N, K, threads, [&]<int ROWS>(long p, long t) {
      multiply<ROWS, false>(w, out, p, t, rows + t * K, row_scales + t * w.groups());
    });
    return;
  }
  uint8_t* packed = rows + bytes;
  pack_tiles<MAX_ROWS>((const Word*)rows, K / STEP, T, K / STEP, (Word*)packed, threads);
  for_tiles_and_panels<MAX_ROWS>(T, N, K, threads, [&]<int ROWS>(long p, long t) {
    multiply<ROWS, true>(w, out, p, t, packed + t * K, row_scales + t * w.groups());
  });
}

// A weight [N, columns] in bfloat16 -> what the product reads.
extern "C" void lpx_pack_int8(const bf16* weight, long stride, long columns, int8_t* panels,
                              int32_t* offsets, float* scales, long N, long K, int threads) {
  const long groups = (K + GROUP - 1) / GROUP;
  pool::parallel_for((N + PANEL - 1) / PANEL, threads, [&](long p) {
    static thread_local Scratch scratch;
    int8_t* rows = (int8_t*)scratch.reserve(PANEL * K);
    std::memset(rows, 0, PANEL * K);
    for (long i = 0; i < PANEL; i++) {
      const long n = p * PANEL + i;
      scales[n] = n < N ? quantise_weight(weight + n * stride, columns, rows + i * K) : 0.f;
      for (long g = 0; g < groups; g++) {
        int32_t total = 0;
        for (long k = g * GROUP; k < std::min((g + 1) * GROUP, K); k++) total += rows[i * K + k];
        offsets[(p * groups + g) * PANEL + i] = -128 * total;
      }
    }
    interleave((const Word*)rows, K / STEP, PANEL, K / STEP, (Word*)(panels + p * PANEL * K), PANEL);
  });
}

// y[t] = row ids[t] of the weight that was packed, as near as its integers have it.
extern "C" void lpx_int8_rows(const int8_t* panels, const float* scales, const int64_t* ids, bf16* y,
                              long T, long K, long columns, int threads) {
  pool::parallel_for(T, threads, [&](long t) {
    const int8_t* row = panels + ids[t] / PANEL * K * PANEL + ids[t] % PANEL * STEP;
    for (long k = 0; k < columns; k += LANES) {
      alignas(64) float numbers[LANES] = {};
      const long count = std::min<long>(LANES, columns - k);
      for (long i = 0; i < count; i++)
        numbers[i] = row[(k + i) / STEP * PANEL * STEP + (k + i) % STEP] * scales[ids[t]];
      store(y + t * columns + k, load(numbers), int(count));
    }
  });
}
