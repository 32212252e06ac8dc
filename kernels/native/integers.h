// Sixteen lanes of 32-bit integers, and products of four bytes in each.
#pragma once

#include "native/simd.h"

namespace simd {

#ifdef LORAPLEX_AVX512

using I = __m512i;

inline I load_ints(const void* p) { return _mm512_loadu_si512(p); }
inline I fill_ints(int x) { return _mm512_set1_epi32(x); }
inline V to_floats(I a) { return _mm512_cvtepi32_ps(a); }
inline void store_bytes(uint8_t* p, V whole) {  // of numbers from 0 to 255
  _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(whole)));
}

// acc + a . b over the four bytes of each lane, a without sign and b with one; nothing saturates.
inline I dot_bytes(I acc, I a, I b) {
#ifdef __AVX512VNNI__
  return _mm512_dpbusd_epi32(acc, a, b);
#else
  const I bytes = _mm512_set1_epi16(0xff);
  const I a_even = _mm512_and_si512(a, bytes), a_odd = _mm512_srli_epi16(a, 8);
  const I b_even = _mm512_srai_epi16(_mm512_slli_epi16(b, 8), 8), b_odd = _mm512_srai_epi16(b, 8);
  return _mm512_add_epi32(
      acc, _mm512_add_epi32(_mm512_madd_epi16(a_even, b_even), _mm512_madd_epi16(a_odd, b_odd)));
#endif
}

#else

struct I {
  __m256i lo, hi;
};

inline I load_ints(const void* p) {
  return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
inline I fill_ints(int x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
inline V to_floats(I a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }
inline void store_bytes(uint8_t* p, V whole) {
  const __m256i words = _mm256_permute4x64_epi64(
      _mm256_packs_epi32(_mm256_cvtps_epi32(whole.lo), _mm256_cvtps_epi32(whole.hi)), 0xd8);
  const __m128i low = _mm256_castsi256_si128(words), high = _mm256_extracti128_si256(words, 1);
  _mm_storeu_si128((__m128i*)p, _mm_packus_epi16(low, high));
}
inline __m256i dot_bytes(__m256i acc, __m256i a, __m256i b) {
  const __m256i bytes = _mm256_set1_epi16(0xff);
  const __m256i a_even = _mm256_and_si256(a, bytes), a_odd = _mm256_srli_epi16(a, 8);
  const __m256i b_even = _mm256_srai_epi16(_mm256_slli_epi16(b, 8), 8);
  const __m256i b_odd = _mm256_srai_epi16(b, 8);
  return _mm256_add_epi32(
      acc, _mm256_add_epi32(_mm256_madd_epi16(a_even, b_even), _mm256_madd_epi16(a_odd, b_odd)));
}
inline I dot_bytes(I acc, I a, I b) {
  return {dot_bytes(acc.lo, a.lo, b.lo), dot_bytes(acc.hi, a.hi, b.hi)};
}

#endif

}  // namespace simd
