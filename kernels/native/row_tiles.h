// The order in which the rows of x meet the panels of a weight.
#pragma once

#include "native/interleave.h"
#include "native/panel.h"
#include "native/pool.h"

namespace simd {

// Up to so many rows are read where they are; more are copied first by `pack_tiles`. Rows that lie a
// large power of two apart would push each other out of the cache.
constexpr long FEW_ROWS = 8;
constexpr long BLOCK_BYTES = 384 << 10;  // of x, beside a panel of weights in the second cache

struct RowTile {
  long first, rows;
};

template <int MAX>
long count_tiles(long rows) {
  return (rows + MAX - 1) / MAX;
}

template <int MAX>
RowTile row_tile(long rows, long tile) {
  const long tiles = count_tiles<MAX>(rows), first = rows * tile / tiles;
  return {first, rows * (tile + 1) / tiles - first};
}

// x [T, words] with a stride -> tiles of [words][at most MAX rows], one behind the other.
template <int MAX = PANEL_ROWS>
void pack_tiles(const Word* x, long stride, long T, long words, Word* packed, int threads) {
  pool::parallel_for(count_tiles<MAX>(T), threads, [&](long i) {
    const RowTile tile = row_tile<MAX>(T, i);
    interleave(x + tile.first * stride, stride, tile.rows, words, packed + tile.first * words, tile.rows);
  });
}

// Calls body<ROWS>(panel, first row) for each tile of T rows and each panel of N columns. A block of
// rows that stays in the cache meets one panel after the other.
template <int MAX = PANEL_ROWS, typename Body>
void for_tiles_and_panels(long T, long N, long row_bytes, int threads, const Body& body) {
  const long tiles = count_tiles<MAX>(T), panels = (N + PANEL - 1) / PANEL;
  const long blocks = std::min(tiles, (T * row_bytes + BLOCK_BYTES - 1) / BLOCK_BYTES);
  pool::parallel_for(blocks * panels, threads, [&](long i) {
    const long block = i / panels, panel = i % panels;
    const auto with_rows = [&]<int ROWS>(long first) {
      body.template operator()<ROWS>(panel, first);
    };
    for (long t = tiles * block / blocks; t < tiles * (block + 1) / blocks; t++)
      call_with_rows<MAX>(int(row_tile<MAX>(T, t).rows), row_tile<MAX>(T, t).first, with_rows);
  });
}

}  // namespace simd
