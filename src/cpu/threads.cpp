// SPDX-License-Identifier: Apache-2.0
#include "cpu/threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/device.h"
#include "core/error.h"
#include "cpu/openmp.h"

namespace quantfuse {
namespace {

// A worker that has run out of work spins this long before it sleeps: the gap between two layers of a model
// is a few microseconds, and waking a sleeping thread costs 30 to 60.
constexpr int kSpins = 4000;

std::atomic<int> requested_threads{0};
thread_local bool inside_task = false;

struct Work {
  threads_internal::Task task;
  const void* context;
  int64_t count;
  int parts;

  void run_part(int part) const {
    inside_task = true;
    task(context, count * part / parts, count * (part + 1) / parts);
    inside_task = false;
  }
};

// ---- On the threads of the OpenMP runtime ----
//
// The workers of a runtime spin for milliseconds behind every region of torch's, on the CPUs that workers of
// our own would need: with both, two threads of ours decoded slower than one. So where there is a runtime,
// the thread that spins for it takes our part. Only by a team as large as the caller's own ones: libgomp ends
// threads that the next team has no use for, and makes them anew for the one behind it. More and smaller
// parts than threads, for whoever is free, were measured and gained nothing.
bool is_team_of(const OpenMp* runtime, int threads) { return runtime && runtime->max_threads() == threads; }

void run_on_team(const OpenMp& runtime, const Work& work) {
  // A team may be smaller than asked for, and a thread of it late: parts go to whoever comes.
  struct Shared {
    const Work& work;
    std::atomic<int> next{0};
  } shared{work};
  const auto body = [](void* data) {
    auto& [work, next] = *static_cast<Shared*>(data);
    for (int part; (part = next.fetch_add(1, std::memory_order_relaxed)) < work.parts;) work.run_part(part);
  };
  runtime.parallel(body, &shared, 0, 0);
}

// ---- On threads of our own ----

class Pool {
 public:
  // Part 0 runs on the calling thread.
  void run(const Work& work) {
    while (static_cast<int>(workers_.size()) < work.parts - 1) {
      const int index = static_cast<int>(workers_.size()) + 1;
      workers_.emplace_back([this, index, seen = round_.load()] { serve(index, seen); });
    }
    work_ = &work;
    pending_.store(work.parts - 1, std::memory_order_relaxed);
    start_round(work.parts);
    work.run_part(0);
    for (int spins = 0; pending_.load(std::memory_order_acquire) != 0; ++spins) pause(spins);
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

  void serve(int index, uint64_t seen) {
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
        work_->run_part(index);
        pending_.fetch_sub(1, std::memory_order_release);
      }
    }
  }

  std::vector<std::thread> workers_;
  std::mutex sleep_;
  std::condition_variable wake_;
  std::atomic<uint64_t> round_{0};
  std::atomic<int> pending_{0};
  const Work* work_ = nullptr;
};

// What divides the work of one call at a time. Never destroyed: a thread of the application may still be
// calling while the process ends.
struct Crew {
  std::mutex owner;
  Pool pool;
  bool may_use_openmp = true;
};

// The child of a fork has none of the threads, and libgomp would wait for those that it had.
Crew* crew = [] {
  pthread_atfork(nullptr, nullptr, [] { (crew = new Crew)->may_use_openmp = false; });
  return new Crew;
}();

bool try_divide(const OpenMp* runtime, const Work& work) {
  std::unique_lock owner(crew->owner, std::try_to_lock);
  if (!owner.owns_lock()) return false;
  if (crew->may_use_openmp && is_team_of(runtime, num_threads())) {
    run_on_team(*runtime, work);
  } else {
    crew->pool.run(work);
  }
  return true;
}

}  // namespace

int num_threads() {
  const int n = requested_threads.load(std::memory_order_relaxed);
  return n > 0 ? n : cpu_settings().threads;
}

void set_num_threads(int n) {
  if (n < 0 || n > kMaxThreads) {
    fail_argument("set_num_threads: num_threads is " + std::to_string(n) + ", expected 0 to " +
                  std::to_string(kMaxThreads));
  }
  requested_threads.store(n, std::memory_order_relaxed);
  find_openmp();
}

void threads_internal::run(int64_t count, int64_t grain, Task task, const void* context) {
  if (count <= 0) return;
  const int64_t parts = std::min<int64_t>(num_threads(), (count + grain - 1) / std::max<int64_t>(grain, 1));
  if (parts > 1 && !inside_task) {
    const OpenMp* runtime = openmp();
    const bool is_inside_region = runtime && runtime->in_parallel() != 0;
    if (!is_inside_region && try_divide(runtime, {task, context, count, static_cast<int>(parts)})) return;
  }
  task(context, 0, count);
}

}  // namespace quantfuse
