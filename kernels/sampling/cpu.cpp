// Which of a row's numbers is the greatest.

#include <algorithm>

#include "native/pool.h"
#include "native/simd.h"

using namespace simd;

namespace {

struct Greatest {
  float value;
  int64_t id;
};

bool is_greater(float a, float b) { return a > b || (std::isnan(a) && !std::isnan(b)); }

// The first greatest of x[begin:end]. A block is looked at number by number only where it holds one that
// is greater than all before, which is seldom, or where it holds what is no finite number.
template <typename E>
Greatest find_greatest(const E* x, long begin, long end) {
  constexpr long BLOCK = 16 * LANES;
  Greatest best{to_float(x[begin]), begin};
  for (long first = begin; first < end; first += BLOCK) {
    const long last = std::min(first + BLOCK, end);
    if (last == first + BLOCK) {
      V peak = fill(best.value), odd = zero();
      for (long i = first; i < last; i += LANES) {
        const V v = load(x + i);
        peak = max(peak, v), odd = add(odd, sub(v, v));
      }
      if (!(highest(peak) > best.value) && sum(odd) == 0) continue;
    }
    for (long i = first; i < last; i++)
      if (is_greater(to_float(x[i]), best.value)) best = {to_float(x[i]), i};
  }
  return best;
}

// values, ids [R, parts] are working memory.
template <typename E>
void argmax(const E* x, long stride, long R, long columns, long part, float* values, int64_t* ids,
            int64_t* out, int threads) {
  const long parts = (columns + part - 1) / part;
  pool::parallel_for(R * parts, threads, [&](long i) {
    const long begin = i % parts * part;
    const Greatest best = find_greatest(x + i / parts * stride, begin, std::min(begin + part, columns));
    values[i] = best.value, ids[i] = best.id;
  });
  for (long r = 0; r < R; r++) {
    long best = r * parts;
    for (long i = best + 1; i < (r + 1) * parts; i++)
      if (is_greater(values[i], values[best])) best = i;
    out[r] = ids[best];
  }
}

}  // namespace

extern "C" void lpx_argmax_float(const float* x, long stride, long R, long columns, long part,
                                 float* values, int64_t* ids, int64_t* out, int threads) {
  argmax(x, stride, R, columns, part, values, ids, out, threads);
}

extern "C" void lpx_argmax_bf16(const bf16* x, long stride, long R, long columns, long part,
                                float* values, int64_t* ids, int64_t* out, int threads) {
  argmax(x, stride, R, columns, part, values, ids, out, threads);
}
