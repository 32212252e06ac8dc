// Workers that spin for a moment after each job and then sleep, so that an idle process uses no core.
//
// Nobody waits for a thread that has not begun: where the system gives the cores to others, the caller
// does the whole job itself. So a busy neighbour costs its share of the time, and not a turn of the
// scheduler at every operation.

#include "native/pool.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <pthread.h>
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>

namespace {

using Word = std::atomic<uint32_t>;

constexpr auto PATIENCE = std::chrono::microseconds(50);
constexpr uint64_t SEAT = uint64_t(1) << 32;

void sleep_while(Word& word, uint32_t value) {
  syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}

void wake(Word& word, int sleepers) {
  syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, sleepers, nullptr, nullptr, 0);
}

template <typename Condition>
bool spin_until(Condition condition) {
  const auto end = std::chrono::steady_clock::now() + PATIENCE;
  do {
    for (int i = 0; i < 32; i++) {
      if (condition()) return true;
      _mm_pause();
    }
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

class Pool {
 public:
  void run(long chunks, int threads, void (*call)(const void*, long), const void* body);

 private:
  struct Job {
    void (*call)(const void*, long);
    const void* body;
    long chunks;
  };

  int do_chunks(uint64_t seat);
  void count_done(int chunks);
  void serve();
  void hire(int workers);

  // What is left of the current job: seats for workers << 32 | chunks that nobody has taken. Whoever
  // takes a chunk may read `job_`, since the job cannot end before that chunk is done.
  alignas(64) std::atomic<uint64_t> offer_{0};
  Job job_{};
  alignas(64) Word undone_{0};  // chunks
  alignas(64) Word jobs_{0};    // counts up: what sleeping workers watch
  Word sleepers_{0};
  std::atomic<bool> caller_sleeps_{false};
  alignas(64) std::atomic_flag busy_;
  int workers_ = 0;
};

// Takes and does chunks until none is left; returns how many. The first one costs a worker a seat.
int Pool::do_chunks(uint64_t seat) {
  int done = 0;
  uint64_t offer = offer_.load(std::memory_order_acquire);
  while (uint32_t(offer) > 0 && offer >= seat) {
    if (!offer_.compare_exchange_weak(offer, offer - seat - 1, std::memory_order_acq_rel)) continue;
    job_.call(job_.body, job_.chunks - long(uint32_t(offer)));
    seat = 0, done++;
    offer = offer_.load(std::memory_order_acquire);
  }
  return done;
}

void Pool::count_done(int chunks) {
  if (chunks == 0) return;
  const bool last = undone_.fetch_sub(uint32_t(chunks)) == uint32_t(chunks);
  if (last && caller_sleeps_) wake(undone_, 1);
}

void Pool::run(long chunks, int threads, void (*call)(const void*, long), const void* body) {
  if (busy_.test_and_set(std::memory_order_acquire)) {
    for (long i = 0; i < chunks; i++) call(body, i);
    return;
  }
  hire(threads - 1);
  job_ = {call, body, chunks};
  undone_.store(uint32_t(chunks), std::memory_order_relaxed);
  offer_.store(SEAT * uint64_t(threads - 1) + uint64_t(chunks), std::memory_order_release);
  jobs_++;
  if (sleepers_) wake(jobs_, threads - 1);
  count_done(do_chunks(0));
  if (!spin_until([&] { return undone_.load(std::memory_order_acquire) == 0; })) {
    caller_sleeps_ = true;  // leaves its core to the worker that it waits for
    while (const uint32_t left = undone_) sleep_while(undone_, left);
    caller_sleeps_ = false;
  }
  busy_.clear(std::memory_order_release);
}

void Pool::serve() {
  for (;;) {
    const uint32_t seen = jobs_;
    const auto is_offered = [&] {
      const uint64_t offer = offer_.load(std::memory_order_relaxed);
      return uint32_t(offer) > 0 && offer >= SEAT;
    };
    if (spin_until(is_offered)) {
      count_done(do_chunks(SEAT));
      continue;
    }
    sleepers_++;
    sleep_while(jobs_, seen);
    sleepers_--;
  }
}

// Goes on with fewer workers where the system gives no more.
void Pool::hire(int workers) {
  if (workers_ >= workers) return;
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
  for (; workers_ < workers; workers_++) {
    const auto start = [](void* pool) -> void* {
      ((Pool*)pool)->serve();
      return nullptr;
    };
    pthread_t worker;
    if (pthread_create(&worker, nullptr, start, this) != 0) break;
    pthread_detach(worker);
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

std::atomic<Pool*> current{nullptr};

// A forked child has the memory of the pool but not its threads. The old pool is not freed: neither
// there nor when the process ends, since its workers look at it until the last moment.
const int forks_start_anew = pthread_atfork(nullptr, nullptr, [] { current = nullptr; });

Pool& the_pool() {
  Pool* pool = current;
  if (pool) return *pool;
  Pool* made = new Pool;
  if (current.compare_exchange_strong(pool, made)) return *made;
  delete made;
  return *pool;
}

}  // namespace

extern "C" void lpx_parallel_for(long chunks, int threads, void (*call)(const void*, long),
                                 const void* body) {
  the_pool().run(chunks, threads, call, body);
}
