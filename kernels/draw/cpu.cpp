// Tokens drawn from logits by temperature, top-k, top-p and min-p.
//
// All cuts are one limit on the probability relative to the likeliest token's. It is found by bisection
// among the few likely tokens; only where these hold too little are more looked at. The draw is a race:
// a token of probability p arrives after an exponentially distributed time / p, and the first one wins.
// So it needs neither a sort nor a sum. (The greatest of log p + Gumbel noise is the same token.)

#include <algorithm>
#include <cmath>
#include <vector>

#include "native/pool.h"
#include "native/scratch.h"
#include "native/simd.h"

using namespace simd;

namespace {

constexpr long CHUNK = 1024;  // tokens whose probabilities are summed in float
constexpr long AT_ONCE = 256;  // tokens whose arrivals are looked at together
constexpr float LOG2E = 1.44269504f;
constexpr float LOOK_ABOVE[] = {0x1p-10f, 0x1p-20f, 0.f};  // relative to the likeliest

struct Settings {
  float temperature, top_p, min_p;
  long top_k;
};

struct Row {  // of relative probabilities, at most 1
  const float* probs;
  long size;
};

template <typename E>
float highest_of(const E* logits, long size) {
  V peak = fill(-INFINITY);
  long i = 0;
  for (; i + LANES <= size; i += LANES) peak = max(load(logits + i), peak);
  float found = highest(peak);
  for (; i < size; i++) found = std::max(found, to_float(logits[i]));
  return found;
}

template <typename E>
void exponentiate(const E* logits, long size, float temperature, float* probs) {
  const V peak = fill(highest_of(logits, size)), slope = fill(std::min(LOG2E / temperature, 1e30f));
  for (long i = 0; i < size; i += LANES) {
    const int left = int(std::min<long>(LANES, size - i));
    store(probs + i, exp2(mul(sub(load(logits + i, left), peak), slope)), left);
  }
}

// The sum of those that are at least `least`.
double mass_of(const float* probs, long size, float least) {
  double total = 0;
  for (long begin = 0; begin < size; begin += CHUNK) {
    const long end = std::min(begin + CHUNK, size);
    V sums = zero();
    long i = begin;
    for (; i + LANES <= end; i += LANES) {
      float kept[LANES];
      for (int k = 0; k < LANES; k++) kept[k] = probs[i + k] >= least ? probs[i + k] : 0.f;
      sums = add(sums, load(kept));
    }
    float rest = sum(sums);
    for (; i < end; i++) rest += probs[i] >= least ? probs[i] : 0.f;
    total += rest;
  }
  return total;
}

double count_of(const float* probs, long size, float least) {
  long count = 0;
  for (long i = 0; i < size; i++) count += probs[i] >= least;
  return double(count);
}

using Measure = double (*)(const float* probs, long size, float least);

// The largest limit at which what is left still measures `goal`. Floats from 0 up are ordered as their
// bits are.
float largest_limit(const float* probs, long size, Measure measure, double goal) {
  uint32_t low = 0, high = 0x3f800001;  // just above 1
  while (high - low > 1) {
    const uint32_t middle = low + (high - low) / 2;
    float limit;
    std::memcpy(&limit, &middle, 4);
    (measure(probs, size, limit) >= goal ? low : high) = middle;
  }
  float limit;
  std::memcpy(&limit, &low, 4);
  return limit;
}

float find_limit(const Row& row, Measure measure, double goal) {
  static thread_local std::vector<float> likely;
  for (const float above : LOOK_ABOVE) {
    likely.clear();
    for (long i = 0; i < row.size; i++)
      if (row.probs[i] >= above) likely.push_back(row.probs[i]);
    if (measure(likely.data(), long(likely.size()), 0.f) >= goal) break;
  }
  return largest_limit(likely.data(), long(likely.size()), measure, goal);
}

float limit_of(const Row& row, const Settings& s) {
  float limit = 0.f;
  if (s.top_k > 0 && s.top_k < row.size) limit = find_limit(row, count_of, double(s.top_k));
  if (s.top_p < 1.f) {
    const double goal = double(s.top_p) * mass_of(row.probs, row.size, limit);
    limit = std::max(limit, find_limit(row, mass_of, goal));
  }
  return std::max(limit, s.min_p);
}

// The noise of one token, as in naive.py.
uint32_t noise(uint64_t key, uint32_t token) {
  uint32_t x = token + uint32_t(key);
  x = (x ^ x >> 17) * 0xed5ad4bb ^ uint32_t(key >> 32);
  x = (x ^ x >> 11) * 0xac4c1b51;
  x = (x ^ x >> 15) * 0x31848bab;
  return x ^ x >> 14;
}

struct Arrival {
  double time = INFINITY;
  long token = 0;
};

// Whether one of the tokens [begin, end) may arrive before a time.
bool may_arrive(const Row& row, long begin, long end, float least, uint64_t key, float time) {
  constexpr float SLACK = 1.f - 0x1p-20f;  // more than rounding adds; and -log(1 - x) is at least x
  int any = 0;
  for (long i = begin; i < end; i++) {
    const float p = row.probs[i], x = float(noise(key, uint32_t(i))) * (0x1p-32f * SLACK);
    any |= (p >= least) & (x < time * p);
  }
  return any;
}

// The token that arrives first, of those that are likely enough.
long winner(const Row& row, float least, uint64_t key) {
  Arrival first;
  for (long begin = 0; begin < row.size; begin += AT_ONCE) {
    const long end = std::min(begin + AT_ONCE, row.size);
    if (!may_arrive(row, begin, end, least, key, float(first.time))) continue;
    for (long i = begin; i < end; i++) {
      if (row.probs[i] < least || row.probs[i] == 0) continue;
      const double x = (noise(key, uint32_t(i)) + 0.5) * 0x1p-32;
      if (x >= first.time * row.probs[i]) continue;
      const double time = -std::log1p(-x) / row.probs[i];
      if (time < first.time) first = {time, i};
    }
  }
  return first.token;
}

template <typename E>
void draw(const E* logits, long stride, long size, const int64_t* rows, const float* temperature,
          const int64_t* top_k, const float* top_p, const float* min_p, const uint64_t* keys,
          int64_t* tokens, long draws, int threads) {
  pool::parallel_for(
      draws, threads,
      [&](long d) {
        static thread_local Scratch scratch;
        float* probs = (float*)scratch.reserve(size * sizeof(float));
        const Settings settings{temperature[d], top_p[d], min_p[d], top_k[d]};
        exponentiate(logits + rows[d] * stride, size, settings.temperature, probs);
        const Row row{probs, size};
        tokens[d] = winner(row, limit_of(row, settings), keys[d]);
      },
      1);
}

}  // namespace

#define LORAPLEX_DRAW(E, NAME)                                                                         \
  extern "C" void NAME(const E* logits, long stride, long size, const int64_t* rows,                  \
                       const float* temperature, const int64_t* top_k, const float* top_p,            \
                       const float* min_p, const uint64_t* keys, int64_t* tokens, long draws,         \
                       int threads) {                                                                 \
    draw<E>(logits, stride, size, rows, temperature, top_k, top_p, min_p, keys, tokens, draws,      \
            threads);                                                                                 \
  }

LORAPLEX_DRAW(float, lpx_draw_float)
LORAPLEX_DRAW(bf16, lpx_draw_bf16)
