// The gated activations of feed-forward layers: activation(gate) * up, rounded once.

#include "native/pool.h"
#include "native/simd.h"

using namespace simd;

namespace {

struct Silu {
  V operator()(V x) const {
    return div(x, add(fill(1.f), exp2(mul(x, fill(-1.44269504f)))));
  }
};

struct GeluTanh {
  V operator()(V x) const {
    const V cubed = mul(mul(x, x), x);
    const V inner = mul(fma(cubed, fill(0.044715f), x), fill(0.7978845608f));
    return mul(mul(x, fill(0.5f)), add(fill(1.f), tanh(inner)));
  }
};

// x [rows, 2 width], y [rows, width], both contiguous.
template <typename E, typename Activation>
void gated(const E* x, E* y, long rows, long width, int threads, Activation activation) {
  pool::parallel_for(rows, threads, [&](long t) {
    const E *gate = x + t * 2 * width, *up = gate + width;
    for (long d = 0; d < width; d += LANES) {
      const int left = int(width - d);
      store(y + t * width + d, mul(activation(load(gate + d, left)), load(up + d, left)), left);
    }
  });
}

}  // namespace

#define LORAPLEX_GATED(NAME, E, ACTIVATION)                                        \
  extern "C" void NAME(const E* x, E* y, long rows, long width, int threads) {     \
    gated(x, y, rows, width, threads, ACTIVATION());                               \
  }

LORAPLEX_GATED(lpx_gated_silu_float, float, Silu)
LORAPLEX_GATED(lpx_gated_silu_bf16, bf16, Silu)
LORAPLEX_GATED(lpx_gated_gelu_tanh_float, float, GeluTanh)
LORAPLEX_GATED(lpx_gated_gelu_tanh_bf16, bf16, GeluTanh)
