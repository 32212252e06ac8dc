// Rows of keys and values into the paged cache, and whole blocks; bytes only, of any number format.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

#include "native/pool.h"
#include "native/scratch.h"

namespace {

struct Rows {  // of keys or of values; lengths and strides in numbers of `size` bytes
  int64_t size, dim, token, head;
  int64_t block, block_head, block_token;  // where they go

  // Copies a token's rows into a slot of the cache.
  void copy(const char* from, long token_index, char* cache, long block_id, long offset, long heads) const {
    for (long h = 0; h < heads; h++)
      std::memcpy(cache + (block_id * block + h * block_head + offset * block_token) * size,
                  from + (token_index * token + h * head) * size, dim * size);
  }
};

struct Sizes {
  int64_t tokens, heads, block_size;
  Rows keys, values;
};

struct Storage {
  char* data;
  long block_stride, block_bytes;  // a block is contiguous
  char* block(int64_t id) const { return data + id * block_stride; }
};

void gather(const Storage& from, const int64_t* ids, char* to, long count, int threads) {
  pool::parallel_for(count, threads, [&](long i) {
    std::memcpy(to + i * from.block_bytes, from.block(ids[i]), from.block_bytes);
  });
}

void scatter(const Storage& to, const int64_t* ids, const char* from, long count, int threads) {
  pool::parallel_for(count, threads, [&](long i) {
    std::memcpy(to.block(ids[i]), from + i * to.block_bytes, to.block_bytes);
  });
}

bool meet(const int64_t* some, const int64_t* others, long count) {
  std::vector<int64_t> sorted(some, some + count);
  std::sort(sorted.begin(), sorted.end());
  return std::any_of(others, others + count, [&](int64_t id) {
    return std::binary_search(sorted.begin(), sorted.end(), id);
  });
}

}  // namespace

extern "C" void lpx_write_cache(char* key_cache, char* value_cache, const char* keys, const char* values,
                                const int64_t* slots, const Sizes* sizes, int threads) {
  const Sizes n = *sizes;
  pool::parallel_for(n.tokens, threads, [&](long t) {
    if (slots[t] < 0) return;  // padding
    const long block = slots[t] / n.block_size, offset = slots[t] % n.block_size;
    n.keys.copy(keys, t, key_cache, block, offset, n.heads);
    n.values.copy(values, t, value_cache, block, offset, n.heads);
  });
}

// out[i] = block ids[i]
extern "C" void lpx_gather_blocks(char* storage, const int64_t* ids, char* out, long count,
                                  long block_stride, long block_bytes, int threads) {
  gather({storage, block_stride, block_bytes}, ids, out, count, threads);
}

// Block ids[i] = blocks[i].
extern "C" void lpx_scatter_blocks(char* storage, const int64_t* ids, const char* blocks, long count,
                                   long block_stride, long block_bytes, int threads) {
  scatter({storage, block_stride, block_bytes}, ids, blocks, count, threads);
}

// Copies block sources[i] over block targets[i], all as they were before.
extern "C" void lpx_copy_blocks(char* data, const int64_t* sources, const int64_t* targets, long count,
                                long block_stride, long block_bytes, int threads) {
  const Storage storage{data, block_stride, block_bytes};
  if (meet(targets, sources, count)) {
    static thread_local simd::Scratch scratch;
    char* aside = (char*)scratch.reserve(count * block_bytes + 64);
    gather(storage, sources, aside, count, threads);
    scatter(storage, targets, aside, count, threads);
    return;
  }
  pool::parallel_for(count, threads, [&](long i) {
    std::memcpy(storage.block(targets[i]), storage.block(sources[i]), block_bytes);
  });
}
