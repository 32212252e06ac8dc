// Rotary position embeddings, with every product and sum rounded as plain torch rounds them.

#include "native/pool.h"
#include "native/simd.h"

using namespace simd;

namespace {

struct Sizes {
  int64_t tokens, heads, kv_heads, dim, width;  // the first `width` numbers of a head are turned
  int64_t query_head, query_token, key_head, key_token, cos_token, sin_token;  // strides, in elements
};

// The value as it would be after a store. For floats it keeps the compiler from fusing the product
// with the sum behind it, which would leave one rounding out.
template <typename E>
inline V rounded(V a) {
#ifdef LORAPLEX_AVX512
  if constexpr (sizeof(E) == 2) return widen(narrow(a));
  asm("" : "+v"(a));
#else
  if constexpr (sizeof(E) == 2) {
    alignas(32) E some[LANES];
    store(some, a);
    return load(some);
  }
  asm("" : "+x"(a.lo), "+x"(a.hi));
#endif
  return a;
}

template <typename E>
void turn(const E* x, const E* cos, const E* sin, E* y, const Sizes& n) {
  const long half = n.width / 2;
  for (long d = 0; d < half; d += LANES) {
    const int left = int(half - d);
    const V lower = load(x + d, left), upper = load(x + half + d, left);
    store(y + d, sub(rounded<E>(mul(lower, load(cos + d, left))), rounded<E>(mul(upper, load(sin + d, left)))),
          left);
    store(y + half + d,
          add(rounded<E>(mul(upper, load(cos + half + d, left))),
              rounded<E>(mul(lower, load(sin + half + d, left)))),
          left);
  }
  std::memcpy((void*)(y + n.width), x + n.width, (n.dim - n.width) * sizeof(E));
}

// y [T, heads + kv_heads, dim]
template <typename E>
void rotate(const E* query, const E* key, const E* cos, const E* sin, E* y, const Sizes& n, int threads) {
  pool::parallel_for(n.tokens, threads, [&](long t) {
    const E *c = cos + t * n.cos_token, *s = sin + t * n.sin_token;
    E* out = y + t * (n.heads + n.kv_heads) * n.dim;
    for (long h = 0; h < n.heads; h++, out += n.dim)
      turn(query + t * n.query_token + h * n.query_head, c, s, out, n);
    for (long h = 0; h < n.kv_heads; h++, out += n.dim)
      turn(key + t * n.key_token + h * n.key_head, c, s, out, n);
  });
}

}  // namespace

extern "C" void lpx_rotate_float(const float* query, const float* key, const float* cos, const float* sin,
                                 float* y, const Sizes* sizes, int threads) {
  rotate(query, key, cos, sin, y, *sizes, threads);
}

extern "C" void lpx_rotate_bf16(const bf16* query, const bf16* key, const bf16* cos, const bf16* sin,
                                bf16* y, const Sizes* sizes, int threads) {
  rotate(query, key, cos, sin, y, *sizes, threads);
}
