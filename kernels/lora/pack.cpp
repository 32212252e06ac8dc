// One adapter's weights on one linear, in the order in which cpu.cpp reads them.

#include <algorithm>
#include <cstdint>
#include <cstring>

#include "native/panel.h"
#include "native/pool.h"

namespace {

using simd::PANEL;

constexpr long LINE_BYTES = 64, RANK_BLOCK = 4;
constexpr long GRAIN = 64 * 1024;  // numbers worth a thread

int useful(long numbers, int threads) { return int(std::clamp<long>(numbers / GRAIN, 1, threads)); }

// a [ranks, depth] -> [ceil(ranks / 4)][ceil(depth / LINE)][4][LINE], zeros for padding
template <typename E>
void pack_down(const E* a, long ranks, long depth, E* out, int threads) {
  constexpr long LINE = LINE_BYTES / sizeof(E);
  const long lines = (depth + LINE - 1) / LINE, row = lines * LINE;
  const long blocks = (ranks + RANK_BLOCK - 1) / RANK_BLOCK;
  pool::parallel_for(blocks, useful(ranks * depth, threads), [&](long block) {
    E* to = out + block * RANK_BLOCK * row;
    std::memset(to, 0, RANK_BLOCK * row * sizeof(E));
    const long count = std::min(RANK_BLOCK, ranks - block * RANK_BLOCK);
    for (long line = 0; line < lines; line++)
      for (long r = 0; r < count; r++)
        std::memcpy(to + (line * RANK_BLOCK + r) * LINE, a + (block * RANK_BLOCK + r) * depth + line * LINE,
                    std::min(LINE, depth - line * LINE) * sizeof(E));
  });
}

// b [width, rank] -> [ceil(width / 32)][ceil(rank / STEP)][32][STEP], zeros for padding
template <typename E>
void pack_up(const E* b, long width, long rank, E* out, int threads) {
  constexpr long STEP = 4 / sizeof(E);
  const long steps = (rank + STEP - 1) / STEP, size = steps * PANEL * STEP;
  pool::parallel_for((width + PANEL - 1) / PANEL, useful(width * rank, threads), [&](long p) {
    E* to = out + p * size;
    std::memset(to, 0, size * sizeof(E));
    const long count = std::min<long>(PANEL, width - p * PANEL);
    for (long column = 0; column < count; column++)
      for (long r = 0; r < rank; r++)
        to[(r / STEP * PANEL + column) * STEP + r % STEP] = b[(p * PANEL + column) * rank + r];
  });
}

}  // namespace

#define LORAPLEX_PACK_LORA(E, DOWN, UP)                                                  \
  extern "C" void DOWN(const E* a, long ranks, long depth, E* out, int threads) {        \
    pack_down<E>(a, ranks, depth, out, threads);                                         \
  }                                                                                      \
  extern "C" void UP(const E* b, long width, long rank, E* out, int threads) {           \
    pack_up<E>(b, width, rank, out, threads);                                            \
  }

LORAPLEX_PACK_LORA(uint32_t, lpx_pack_lora_shrink_float, lpx_pack_lora_expand_float)
LORAPLEX_PACK_LORA(uint16_t, lpx_pack_lora_shrink_bf16, lpx_pack_lora_expand_bf16)
