// SPDX-License-Identifier: Apache-2.0
#include "checkpoint/parallel.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "quantfuse/quantfuse.h"

namespace quantfuse::checkpoint {

int num_worker_threads() { return qf_get_num_threads(); }

OneThreadPerCall::OneThreadPerCall() : before_(qf_get_num_threads()) { qf_set_num_threads(1); }
OneThreadPerCall::~OneThreadPerCall() { qf_set_num_threads(before_); }

void for_each_piece(int64_t count, int num_threads, const std::function<void(int thread, int64_t i)>& body) {
  std::atomic<int64_t> next{0};
  std::exception_ptr first_error;
  std::mutex error_mutex;
  const auto work = [&](int thread) {
    try {
      for (int64_t i; (i = next++) < count;) body(thread, i);
    } catch (...) {
      next = count;
      const std::lock_guard lock(error_mutex);
      if (!first_error) first_error = std::current_exception();
    }
  };
  std::vector<std::thread> threads;
  for (int thread = 1; thread < std::min<int64_t>(num_threads, count); ++thread)
    threads.emplace_back(work, thread);
  work(0);
  for (std::thread& thread : threads) thread.join();
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace quantfuse::checkpoint
