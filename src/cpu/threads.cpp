// SPDX-License-Identifier: Apache-2.0
#include "cpu/threads.h"

#include <dlfcn.h>
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/device.h"
#include "core/error.h"

namespace quantfuse {
namespace {

// A worker that has run out of work spins this long before it sleeps: the gap between two layers of a model
// is a few microseconds, and waking a sleeping thread costs 30 to 60.
constexpr int kSpins = 4000;

std::atomic<int> requested_threads{0};
thread_local bool inside_task = false;

int default_threads() {
  static const int n = [] {
    if (const char* text = std::getenv("QUANTFUSE_NUM_THREADS"); text && *text) {
      const int value = std::atoi(text);
      if (value >= 1) return std::min(value, 1024);
    }
    return std::max(1, cpu_info().num_cpus);
  }();
  return n;
}

// Whether the caller is inside an OpenMP parallel region of any runtime that is visible to us.
bool inside_openmp_region() {
  using InParallel = int (*)();
  static const auto in_parallel = reinterpret_cast<InParallel>(dlsym(RTLD_DEFAULT, "omp_in_parallel"));
  return in_parallel && in_parallel() != 0;
}

class Pool {
 public:
  // Runs task on `parts` ranges, part 0 on the calling thread. False if the pool is taken.
  bool try_run(int64_t count, int parts, threads_internal::Task task, const void* context) {
    std::unique_lock owner(owner_, std::try_to_lock);
    if (!owner.owns_lock()) return false;
    while (static_cast<int>(workers_.size()) < parts - 1) {
      const int index = static_cast<int>(workers_.size()) + 1;
      workers_.emplace_back([this, index, seen = round_.load()] { work(index, seen); });
    }
    count_ = count, task_ = task, context_ = context;
    pending_.store(parts - 1, std::memory_order_relaxed);
    start_round(parts);
    run_part(0, parts);
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) pause(spins);
    return true;
  }

 private:
  static constexpr int kPartsBits = 16;

  // A round's number and its number of parts are one word: a worker that wakes late sees both or neither, and
  // one that has no part in a round touches nothing else of it.
  void start_round(int parts) {
    {
      std::lock_guard lock(sleep_);
      const uint64_t number = (round_.load(std::memory_order_relaxed) >> kPartsBits) + 1;
      round_.store(number << kPartsBits | static_cast<uint64_t>(parts), std::memory_order_release);
    }
    wake_.notify_all();
  }

  static void pause(int spins) {
    // On a machine with fewer CPUs than threads the one waited for may need ours.
    if (spins > kSpins) {
      std::this_thread::yield();
    } else {
#if defined(__x86_64__)
      __builtin_ia32_pause();
#endif
    }
  }

  void run_part(int part, int parts) {
    inside_task = true;
    task_(context_, count_ * part / parts, count_ * (part + 1) / parts);
    inside_task = false;
  }

  void work(int index, uint64_t seen) {
    for (;;) {
      uint64_t round = seen;
      for (int spins = 0; spins < kSpins && (round = round_.load(std::memory_order_acquire)) == seen; ++spins)
        pause(spins);
      if (round == seen) {
        std::unique_lock lock(sleep_);
        wake_.wait(lock, [&] { return (round = round_.load(std::memory_order_acquire)) != seen; });
      }
      seen = round;
      const int parts = static_cast<int>(round & ((1u << kPartsBits) - 1));
      if (index < parts) {
        run_part(index, parts);
        pending_.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  std::mutex owner_;
  std::vector<std::thread> workers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> pending_{0};
  int64_t count_ = 0;
  threads_internal::Task task_ = nullptr;
  const void* context_ = nullptr;
};

// Never destroyed: a thread of the application may still be calling while the process ends.
// After fork() the child has no workers, so it gets a pool of its own.
Pool* pool = nullptr;

Pool& the_pool() {
  static const bool is_ready = [] {
    pool = new Pool;
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool; });
    return true;
  }();
  (void)is_ready;
  return *pool;
}

}  // namespace

int num_threads() {
  const int n = requested_threads.load(std::memory_order_relaxed);
  return n > 0 ? n : default_threads();
}

void set_num_threads(int n) {
  if (n < 0 || n > 1024)
    fail_argument("set_num_threads: num_threads is " + std::to_string(n) + ", expected 0 to 1024");
  requested_threads.store(n, std::memory_order_relaxed);
}

void threads_internal::run(int64_t count, int64_t grain, Task task, const void* context) {
  if (count <= 0) return;
  const int64_t parts = std::min<int64_t>(num_threads(), (count + grain - 1) / std::max<int64_t>(grain, 1));
  if (parts > 1 && !inside_task && !inside_openmp_region() &&
      the_pool().try_run(count, static_cast<int>(parts), task, context)) {
    return;
  }
  task(context, 0, count);
}

}  // namespace quantfuse
