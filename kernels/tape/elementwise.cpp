// Arithmetic and copies number by number, over operands of any strides.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "native/pool.h"
#include "native/simd.h"

namespace {

using simd::bf16;
using simd::to_float;

constexpr int DIMS = 6;
constexpr long GRAIN = 16 * 1024;  // numbers in a chunk

float to_float(int64_t x) { return float(x); }

template <typename T>
T from_float(float x);
template <>
float from_float<float>(float x) { return x; }
template <>
bf16 from_float<bf16>(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return {uint16_t(x != x ? 0x7fc0 : rounded)};
}

// The last dimension is walked inside; `strides` of up to three operands, in numbers.
struct Walk {
  long outer = 1, inner;
  int dims;
  const long* sizes;
  const long* strides[3];

  Walk(const long* numbers, int operands) : dims(int(numbers[0])), sizes(numbers + 1) {
    for (int o = 0; o < operands; o++) strides[o] = sizes + (o + 1) * dims;
    for (int d = 0; d < dims - 1; d++) outer *= sizes[d];
    inner = sizes[dims - 1];
  }
  long step(int operand) const { return strides[operand][dims - 1]; }
  long offset(int operand, long row) const {
    long offset = 0;
    for (int d = dims - 2; d >= 0; d--) {
      offset += row % sizes[d] * strides[operand][d];
      row /= sizes[d];
    }
    return offset;
  }
  template <typename Body>
  void each_row(int threads, const Body& body) const {
    if (inner == 0) return;
    pool::parallel_for(outer, threads, body, std::max(1L, GRAIN / inner));
  }
};

template <typename A, typename B, typename Out, typename Op>
void apply(const A* a, const B* b, Out* out, long n, long sa, long sb, long so, Op op) {
  if (sa == 1 && sb == 1 && so == 1) {
    for (long i = 0; i < n; i++) out[i] = from_float<Out>(op(to_float(a[i]), to_float(b[i])));
  } else if (sa == 1 && sb == 0 && so == 1) {
    const float same = to_float(*b);
    for (long i = 0; i < n; i++) out[i] = from_float<Out>(op(to_float(a[i]), same));
  } else {
    for (long i = 0; i < n; i++)
      out[i * so] = from_float<Out>(op(to_float(a[i * sa]), to_float(b[i * sb])));
  }
}

template <typename A, typename B, typename Out, typename Op>
void binary(const void* a, const void* b, void* out, const long* numbers, int threads, Op op) {
  const Walk walk(numbers, 3);
  walk.each_row(threads, [&](long row) {
    apply((const A*)a + walk.offset(0, row), (const B*)b + walk.offset(1, row),
          (Out*)out + walk.offset(2, row), walk.inner, walk.step(0), walk.step(1), walk.step(2), op);
  });
}

template <typename A, typename B, typename Out>
void arithmetic(char op, const void* a, const void* b, void* out, const long* numbers, int threads) {
  const auto run = [&](auto f) { binary<A, B, Out>(a, b, out, numbers, threads, f); };
  switch (op) {
    case '+': return run([](float x, float y) { return x + y; });
    case '-': return run([](float x, float y) { return x - y; });
    case '*': return run([](float x, float y) { return x * y; });
    case '/': return run([](float x, float y) { return x / y; });
  }
}

template <typename A, typename Out>
void convert(const void* a, void* out, const long* numbers, int threads) {
  binary<A, A, Out>(a, a, out, numbers, threads, [](float x, float) { return x; });
}

template <typename T>
void copy(const void* from, void* to, const long* numbers, int threads) {
  const Walk walk(numbers, 2);
  const long step = walk.step(0), out_step = walk.step(1);
  walk.each_row(threads, [&](long row) {
    const T* a = (const T*)from + walk.offset(0, row);
    T* out = (T*)to + walk.offset(1, row);
    if (step == 1 && out_step == 1) {
      std::memcpy(out, a, walk.inner * sizeof(T));
    } else {
      for (long i = 0; i < walk.inner; i++) out[i * out_step] = a[i * step];
    }
  });
}

}  // namespace

// `numbers`: how many dimensions, their sizes, and the strides of a, b and out.
#define LPX_ARITHMETIC(A, B, Out, suffix)                                                            \
  extern "C" void lpx_arithmetic_##suffix(const void* a, const void* b, void* out, const long* numbers, \
                                          int op, int threads) {                                     \
    arithmetic<A, B, Out>(char(op), a, b, out, numbers, threads);                                    \
  }
LPX_ARITHMETIC(float, float, float, fff)
LPX_ARITHMETIC(float, bf16, float, fbf)
LPX_ARITHMETIC(bf16, float, float, bff)
LPX_ARITHMETIC(bf16, float, bf16, bfb)
LPX_ARITHMETIC(bf16, bf16, bf16, bbb)

// `numbers`: how many dimensions, their sizes, and the strides of a (given twice) and out.
#define LPX_CONVERT(A, Out, suffix)                                                                  \
  extern "C" void lpx_convert_##suffix(const void* a, void* out, const long* numbers, int threads) { \
    convert<A, Out>(a, out, numbers, threads);                                                       \
  }
LPX_CONVERT(float, bf16, fb)
LPX_CONVERT(bf16, float, bf)
LPX_CONVERT(int64_t, float, lf)

// Numbers of `size` bytes, as they are. `numbers`: dimensions, sizes, the strides of both.
extern "C" void lpx_copy_strided(const void* from, void* to, const long* numbers, int size, int threads) {
  switch (size) {
    case 1: return copy<uint8_t>(from, to, numbers, threads);
    case 2: return copy<uint16_t>(from, to, numbers, threads);
    case 4: return copy<uint32_t>(from, to, numbers, threads);
    case 8: return copy<uint64_t>(from, to, numbers, threads);
  }
}

// Rows of `bytes` bytes of a table, by their numbers, one after another; -1 is the table's last.
extern "C" void lpx_gather_rows(const void* table, long table_rows, const int64_t* ids, void* out,
                                long num_rows, long stride, long bytes, int threads) {
  pool::parallel_for(num_rows, threads, [&](long row) {
    const long id = ids[row] < 0 ? ids[row] + table_rows : ids[row];
    std::memcpy((char*)out + row * bytes, (const char*)table + id * stride, bytes);
  });
}
