// Rows whose words are put side by side, so that a product reads several rows in one stream.
#pragma once

#include <immintrin.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace simd {

using Word = uint32_t;  // what one lane of a product takes of a row: two bf16 or four bytes

// x [4][stride], its first 4 words -> out [4 words][4 rows] with out_stride
inline void interleave_four(const Word* x, long stride, Word* out, long out_stride) {
  const auto row = [&](long i) { return _mm_loadu_ps((const float*)(x + i * stride)); };
  __m128 a = row(0), b = row(1), c = row(2), d = row(3);
  _MM_TRANSPOSE4_PS(a, b, c, d);
  _mm_storeu_ps((float*)out, a);
  _mm_storeu_ps((float*)(out + out_stride), b);
  _mm_storeu_ps((float*)(out + 2 * out_stride), c);
  _mm_storeu_ps((float*)(out + 3 * out_stride), d);
}

// x [rows, words] with a stride -> out [words, out_stride], of which the first `rows` are written
inline void interleave(const Word* x, long stride, long rows, long words, Word* out, long out_stride) {
  const long whole = rows < 4 ? 0 : words - words % 4;
  for (long k = 0; k < whole; k += 4)
    for (long i = 0; i < rows; i += 4) {
      const long four = std::min(i, rows - 4);
      interleave_four(x + four * stride + k, stride, out + k * out_stride + four, out_stride);
    }
  for (long k = whole; k < words; k++)
    for (long i = 0; i < rows; i++) out[k * out_stride + i] = x[i * stride + k];
}

}  // namespace simd
