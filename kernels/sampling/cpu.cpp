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

// The first greatest of x[begin:end], number by number.
template <typename E>
Greatest search(const E* x, long begin, long end) {
  Greatest best{to_float(x[begin]), begin};
  for (long i = begin + 1; i < end; i++)
    if (is_greater(to_float(x[i]), best.value)) best = {to_float(x[i]), i};
  return best;
}

// The same: only the first block that holds the greatest is searched, if all numbers are finite.
template <typename E>
Greatest find_greatest(const E* x, long begin, long end) {
  constexpr long BLOCK = 16 * LANES;
  V odd = zero();
  float peak = -INFINITY;
  long found = begin, first = begin;
  for (; first + BLOCK <= end; first += BLOCK) {
    V block = load(x + first);
    for (long i = first; i < first + BLOCK; i += LANES) {
      const V v = load(x + i);
      block = max(block, v), odd = add(odd, sub(v, v));
    }
    if (highest(block) > peak) peak = highest(block), found = first;
  }
  if (sum(odd) != 0 || first == begin) return search(x, begin, end);
  Greatest best = search(x, found, found + BLOCK);
  if (first == end) return best;
  const Greatest rest = search(x, first, end);
  return is_greater(rest.value, best.value) ? rest : best;
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
