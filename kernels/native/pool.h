// The threads on which the operations of this library run.
#pragma once

#include <algorithm>

namespace pool {

// Calls call(body, i) once for each i below `chunks`, on at most `threads` threads. The caller is one
// of them: it takes chunks like the others, and waits only for those that others have begun. A call
// from inside a chunk, or while another thread's call runs, is done by its caller alone.
extern "C" void lpx_parallel_for(long chunks, int threads, void (*call)(const void*, long),
                                 const void* body);

// Calls body(i) once for each i below `items`. Threads take `chunk` neighbours at a time; 0: so many
// that each thread takes a few times.
template <typename Body>
void parallel_for(long items, int threads, const Body& body, long chunk = 0) {
  if (chunk == 0) chunk = items / (8L * std::max(threads, 1)) + 1;
  if (threads <= 1 || items <= chunk) {
    for (long i = 0; i < items; i++) body(i);
    return;
  }
  struct Chunks {
    const Body& body;
    long items, size;
  };
  const Chunks chunks{body, items, chunk};
  lpx_parallel_for(
      (items + chunk - 1) / chunk, threads,
      [](const void* context, long c) {
        const Chunks& all = *(const Chunks*)context;
        const long end = std::min((c + 1) * all.size, all.items);
        for (long i = c * all.size; i < end; i++) all.body(i);
      },
      &chunks);
}

}  // namespace pool
