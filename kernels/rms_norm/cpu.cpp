// Root mean square normalisation of rows.

#include "native/pool.h"
#include "native/simd.h"

using namespace simd;

namespace {

template <typename E>
void normalise(const E* x, const float* weight, float eps, E* y, long columns, bool round_first) {
  V squares = zero();
  for (long d = 0; d < columns; d += LANES) {
    const V v = load(x + d, int(columns - d));
    squares = fma(v, v, squares);
  }
  const V scale = fill(1.f / std::sqrt(sum(squares) / columns + eps));
  for (long d = 0; d < columns; d += LANES) {
    const int left = int(columns - d);
    V v = mul(load(x + d, left), scale);
    if (round_first) {
      alignas(64) E rounded[LANES];
      store(rounded, v);
      v = load(rounded);
    }
    store(y + d, mul(v, load(weight + d, left)), left);
  }
}

// x [outer, inner, columns] with strides, y contiguous.
template <typename E>
void rms_norm(const E* x, const float* weight, E* y, float eps, const int64_t* sizes, bool round_first,
              int threads) {
  const long outer = sizes[0], inner = sizes[1], columns = sizes[2];
  const long outer_stride = sizes[3], inner_stride = sizes[4];
  pool::parallel_for(outer * inner, threads, [&](long i) {
    normalise(x + i / inner * outer_stride + i % inner * inner_stride, weight, eps, y + i * columns,
              columns, round_first);
  });
}

}  // namespace

extern "C" void lpx_rms_norm_float(const float* x, const float* weight, float* y, float eps,
                                   const int64_t* sizes, int round_first, int threads) {
  rms_norm(x, weight, y, eps, sizes, round_first, threads);
}

extern "C" void lpx_rms_norm_bf16(const bf16* x, const float* weight, bf16* y, float eps,
                                  const int64_t* sizes, int round_first, int threads) {
  rms_norm(x, weight, y, eps, sizes, round_first, threads);
}
