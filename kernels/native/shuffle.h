// Sums of whole registers, and rearrangements of what lies in several.
#pragma once

#include "simd.h"

namespace simd {

#ifdef LORAPLEX_AVX512

constexpr int SUMS = 16;  // registers that are summed at a time

// out[i] = the sum of the lanes of v[i], added in the order in which sum() adds them.
inline void store_sums(float* out, const V (&v)[SUMS]) {
  const auto halves = [](V a, V b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  };
  const auto quarters = [](V a, V b) {
    return add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  };
  V four[4];  // [i]: four lanes each of v[i], v[i + 4], v[i + 8], v[i + 12]
  for (int i = 0; i < 4; i++) four[i] = quarters(halves(v[i], v[i + 4]), halves(v[i + 8], v[i + 12]));
  const auto eighths = [](V a, V b) {
    const __m512d p = _mm512_castps_pd(a), q = _mm512_castps_pd(b);
    return add(_mm512_castpd_ps(_mm512_unpacklo_pd(p, q)), _mm512_castpd_ps(_mm512_unpackhi_pd(p, q)));
  };
  const V a = eighths(four[0], four[1]), b = eighths(four[2], four[3]);
  store(out, add(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd)));
}

// The first n numbers at an address, as far as a register goes; zeros behind them.
inline __m512i read_line(const float* p, long n) {
  return n >= LANES ? _mm512_loadu_si512(p) : _mm512_maskz_loadu_epi32(mask16(int(n)), p);
}
inline __m512i read_line(const bf16* p, long n) {
  if (n >= 2 * LANES) return _mm512_loadu_si512(p);
  return _mm512_maskz_loadu_epi16(n <= 0 ? 0 : (1u << n) - 1, p);
}

struct Pairs {
  __m512i lower, upper;
};

// (a0, b0), (a1, b1), ...: the numbers of two lines of bf16, two by two.
inline Pairs interleave(__m512i a, __m512i b) {
  const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39,
                                         7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
  const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
  return {_mm512_permutex2var_epi16(a, first, b), _mm512_permutex2var_epi16(a, second, b)};
}

// Sixteen lines of sixteen words: word j of line i becomes word i of line j.
inline void transpose(__m512i (&line)[LANES]) {
  __m512i w[LANES];
  for (int i = 0; i < LANES; i += 2) {
    w[i] = _mm512_unpacklo_epi32(line[i], line[i + 1]);
    w[i + 1] = _mm512_unpackhi_epi32(line[i], line[i + 1]);
  }
  for (int i = 0; i < LANES; i += 4)
    for (int c = 0; c < 2; c++) {
      line[i + 2 * c] = _mm512_unpacklo_epi64(w[i + c], w[i + c + 2]);
      line[i + 2 * c + 1] = _mm512_unpackhi_epi64(w[i + c], w[i + c + 2]);
    }
  for (int c = 0; c < 4; c++) {  // line[i + c]: words c, c + 4, c + 8, c + 12 of lines i to i + 3
    const __m512i a = _mm512_shuffle_i32x4(line[c], line[4 + c], 0x88);
    const __m512i b = _mm512_shuffle_i32x4(line[c], line[4 + c], 0xdd);
    const __m512i d = _mm512_shuffle_i32x4(line[8 + c], line[12 + c], 0x88);
    const __m512i e = _mm512_shuffle_i32x4(line[8 + c], line[12 + c], 0xdd);
    w[c] = _mm512_shuffle_i32x4(a, d, 0x88);
    w[4 + c] = _mm512_shuffle_i32x4(b, e, 0x88);
    w[8 + c] = _mm512_shuffle_i32x4(a, d, 0xdd);
    w[12 + c] = _mm512_shuffle_i32x4(b, e, 0xdd);
  }
  for (int i = 0; i < LANES; i++) line[i] = w[i];
}

#else

constexpr int SUMS = 4;

inline void store_sums(float* out, const V (&v)[SUMS]) {
  for (int i = 0; i < SUMS; i++) out[i] = sum(v[i]);
}

#endif

}  // namespace simd
