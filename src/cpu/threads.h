// SPDX-License-Identifier: Apache-2.0
//
// One crew for the process: the threads of the OpenMP runtime that is loaded already, where its teams have as
// many as we may use, else a pool of our own. It belongs to one call at a time: a call that finds it taken,
// or that is made inside one of its tasks or inside a caller's OpenMP region, runs on its own thread, so
// nothing ever oversubscribes the machine.
#pragma once

#include <cstdint>
#include <memory>
#include <type_traits>

namespace quantfuse {

int num_threads();
void set_num_threads(int n);  // 0: back to the environment or the number of CPUs

namespace threads_internal {
using Task = void (*)(const void* context, int64_t begin, int64_t end);
void run(int64_t count, int64_t grain, Task task, const void* context);
}  // namespace threads_internal

// Calls body(begin, end) over [0, count), cut into at most one contiguous range per thread, none shorter
// than `grain` but the last. The ranges depend on `count`, `grain` and the number of threads alone; a thread
// may get more than one. `body` must not throw.
template <class Body>
void parallel_ranges(int64_t count, int64_t grain, const Body& body) {
  threads_internal::run(
      count, grain,
      [](const void* context, int64_t begin, int64_t end) {
        (*static_cast<const Body*>(context))(begin, end);
      },
      std::addressof(body));
}

}  // namespace quantfuse
