// SPDX-License-Identifier: Apache-2.0
//
// Pieces of work on several threads.
#pragma once

#include <cstdint>
#include <functional>

namespace quantfuse::checkpoint {

// As many as the library's kernels may use.
int num_worker_threads();

// Calls body(thread, i) for every i in [0, count), thread in [0, num_threads). The first exception ends the
// work and is thrown again here.
void for_each_piece(int64_t count, int num_threads, const std::function<void(int thread, int64_t i)>& body);

// While it lives, a call of a kernel runs on the thread that makes it: for pieces that call kernels.
class OneThreadPerCall {
 public:
  OneThreadPerCall();
  ~OneThreadPerCall();
  OneThreadPerCall(const OneThreadPerCall&) = delete;
  OneThreadPerCall& operator=(const OneThreadPerCall&) = delete;

 private:
  int before_;
};

}  // namespace quantfuse::checkpoint
