// Sixteen float lanes, on AVX-512 or on a pair of AVX2 registers, and the number formats in memory.
#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#ifdef __AVX512F__
#define LORAPLEX_AVX512 1
#endif

namespace simd {

struct bf16 {
  uint16_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float out;
  std::memcpy(&out, &bits, 4);
  return out;
}

constexpr int LANES = 16;

#ifdef LORAPLEX_AVX512

using V = __m512;

inline __mmask16 mask16(int n) {  // the first n lanes
  return __mmask16(n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1);
}

inline V zero() { return _mm512_setzero_ps(); }
inline V fill(float x) { return _mm512_set1_ps(x); }
inline V add(V a, V b) { return _mm512_add_ps(a, b); }
inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
inline V div(V a, V b) { return _mm512_div_ps(a, b); }
inline V max(V a, V b) { return _mm512_max_ps(a, b); }
inline V min(V a, V b) { return _mm512_min_ps(a, b); }
inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
inline V round(V a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
inline V scale_by_power(V a, V exponent) { return _mm512_scalef_ps(a, exponent); }
inline float sum(V a) { return _mm512_reduce_add_ps(a); }
inline float highest(V a) { return _mm512_reduce_max_ps(a); }

inline V widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
// Rounds to nearest, ties to even; a NaN stays one.
#ifdef __AVX512BF16__
inline __m256i narrow(V a) { return (__m256i)_mm512_cvtneps_pbh(a); }
#else
inline __m256i narrow(V a) {
  const __m512i bits = _mm512_castps_si512(a);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
  const __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
  const __mmask16 nan = _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_set1_epi32(rounded, nan, 0x7fc0));
}
#endif

inline V load(const float* p) { return _mm512_loadu_ps(p); }
inline V load(const float* p, int n) { return _mm512_maskz_loadu_ps(mask16(n), p); }
inline V load(const bf16* p) { return widen(_mm256_loadu_si256((const __m256i*)p)); }
inline V load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(mask16(n), p)); }
inline void store(float* p, V a) { _mm512_storeu_ps(p, a); }
inline void store(float* p, V a, int n) { _mm512_mask_storeu_ps(p, mask16(n), a); }
inline void store(bf16* p, V a) { _mm256_storeu_si256((__m256i*)p, narrow(a)); }
inline void store(bf16* p, V a, int n) { _mm256_mask_storeu_epi16(p, mask16(n), narrow(a)); }

// The even and the odd members of sixteen pairs of bf16.
inline V even(const bf16* pairs) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_loadu_si512(pairs), 16));
}
inline V odd(const bf16* pairs) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  return _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(pairs), upper));
}

#else

struct V {
  __m256 lo, hi;
};

inline V zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline V fill(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
inline V add(V a, V b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline V sub(V a, V b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline V mul(V a, V b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline V div(V a, V b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline V max(V a, V b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline V min(V a, V b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline V fma(V a, V b, V c) {
  return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline V round(V a) {
  constexpr int nearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
  return {_mm256_round_ps(a.lo, nearest), _mm256_round_ps(a.hi, nearest)};
}
inline __m256 power_of_two(__m256 exponent) {  // in two halves, so that 2^-160 does not wrap
  const __m256i all = _mm256_cvtps_epi32(exponent);
  const __m256i half = _mm256_srai_epi32(all, 1);
  const __m256i rest = _mm256_sub_epi32(all, half);
  const __m256i bias = _mm256_set1_epi32(127);
  return _mm256_mul_ps(
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)),
      _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23)));
}
inline V scale_by_power(V a, V exponent) {
  return mul(a, {power_of_two(exponent.lo), power_of_two(exponent.hi)});
}
inline float sum(V a) {
  const __m256 eight = _mm256_add_ps(a.lo, a.hi);
  __m128 x = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_add_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_add_ss(x, _mm_movehdup_ps(x)));
}
inline float highest(V a) {
  const __m256 eight = _mm256_max_ps(a.lo, a.hi);
  __m128 x = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  x = _mm_max_ps(x, _mm_movehl_ps(x, x));
  return _mm_cvtss_f32(_mm_max_ss(x, _mm_movehdup_ps(x)));
}

inline __m256 widen(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline __m128i narrow(__m256 a) {
  const __m256i bits = _mm256_castps_si256(a);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  const __m256i bias = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
  __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, bias), 16);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
  const __m256i packed = _mm256_packus_epi32(rounded, rounded);
  return _mm256_castsi256_si128(_mm256_permute4x64_epi64(packed, 0x08));
}

inline V load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline V load(const bf16* p) {
  return {widen(_mm_loadu_si128((const __m128i*)p)), widen(_mm_loadu_si128((const __m128i*)p + 1))};
}
inline void store(float* p, V a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
inline void store(bf16* p, V a) {
  _mm_storeu_si128((__m128i*)p, narrow(a.lo));
  _mm_storeu_si128((__m128i*)p + 1, narrow(a.hi));
}
template <typename E>
inline V load(const E* p, int n) {
  if (n >= LANES) return load(p);
  E some[LANES] = {};
  if (n > 0) std::memcpy(some, p, n * sizeof(E));
  return load(some);
}
template <typename E>
inline void store(E* p, V a, int n) {
  if (n >= LANES) return store(p, a);
  E some[LANES];
  store(some, a);
  if (n > 0) std::memcpy(p, some, n * sizeof(E));
}

inline V even(const bf16* pairs) {
  const __m256i* p = (const __m256i*)pairs;
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(p + 1), 16))};
}
inline V odd(const bf16* pairs) {
  const __m256i* p = (const __m256i*)pairs;
  const __m256i upper = _mm256_set1_epi32(int(0xffff0000));
  return {_mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p), upper)),
          _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p + 1), upper))};
}

#endif

// 2^x with a relative error of 2e-7; 0 from x = -160 down, -inf included; a NaN stays one.
inline V exp2(V x) {
  x = min(fill(127.f), max(fill(-160.f), x));
  const V whole = round(x);
  const V rest = sub(x, whole);
  V p = fill(1.5353362e-4f);
  p = fma(p, rest, fill(1.3398874e-3f));
  p = fma(p, rest, fill(9.6184373e-3f));
  p = fma(p, rest, fill(5.5503324e-2f));
  p = fma(p, rest, fill(2.4022648e-1f));
  p = fma(p, rest, fill(6.9314720e-1f));
  p = fma(p, rest, fill(1.f));
  return scale_by_power(p, whole);
}

inline V tanh(V x) {  // 1 - 2 / (e^2x + 1)
  const V e = exp2(mul(x, fill(2.f * 1.44269504f)));
  return sub(fill(1.f), div(fill(2.f), add(e, fill(1.f))));
}

// A run of one row of numbers as a dot product reads it.
template <typename E>
struct Run {
  static constexpr int WIDTH = LANES;
  using type = V;
  static type read(const E* p) { return load(p); }
  static type read(const E* p, int n) { return load(p, n); }
  static V dot(V sum, type a, type b) { return fma(a, b, sum); }
};

#ifdef __AVX512BF16__
template <>
struct Run<bf16> {
  static constexpr int WIDTH = 2 * LANES;
  using type = __m512bh;
  static type read(const bf16* p) { return (type)_mm512_loadu_si512(p); }
  static type read(const bf16* p, int n) {
    const __mmask32 mask = n >= 32 ? 0xffffffffu : (1u << n) - 1;
    return (type)_mm512_maskz_loadu_epi16(mask, p);
  }
  static V dot(V sum, type a, type b) { return _mm512_dpbf16_ps(sum, a, b); }
};
#endif

}  // namespace simd
