// Rows of keys and values into the paged cache, and whole blocks; bytes only, of any number format.

#include <cstdint>
#include <cstring>

#include "native/pool.h"

namespace {

struct Sizes {  // strides and row lengths in bytes
  int64_t tokens, heads, block_size;
  int64_t key_bytes, key_token, key_head, key_block, key_block_head, key_block_token;
  int64_t value_bytes, value_token, value_head, value_block, value_block_head, value_block_token;
};

}  // namespace

extern "C" void lpx_write_cache(char* key_cache, char* value_cache, const char* keys, const char* values,
                                const int64_t* slots, const Sizes* sizes, int threads) {
  const Sizes n = *sizes;
  pool::parallel_for(n.tokens, threads, [&](long t) {
    if (slots[t] < 0) return;  // padding
    const long block = slots[t] / n.block_size, offset = slots[t] % n.block_size;
    char* key = key_cache + block * n.key_block + offset * n.key_block_token;
    char* value = value_cache + block * n.value_block + offset * n.value_block_token;
    for (long h = 0; h < n.heads; h++) {
      std::memcpy(key + h * n.key_block_head, keys + t * n.key_token + h * n.key_head, n.key_bytes);
      std::memcpy(value + h * n.value_block_head, values + t * n.value_token + h * n.value_head,
                  n.value_bytes);
    }
  });
}

// Copies block sources[i] over block targets[i]; a block is `block_bytes` long and contiguous.
extern "C" void lpx_copy_blocks(char* storage, const int64_t* sources, const int64_t* targets, long count,
                                long block_stride, long block_bytes) {
  for (long i = 0; i < count; i++)
    std::memcpy(storage + targets[i] * block_stride, storage + sources[i] * block_stride, block_bytes);
}
