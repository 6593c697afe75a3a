// SPDX-License-Identifier: Apache-2.0
//
// The OpenMP runtime that is in the process already: torch's, oneDNN's or the application's. We link none.
#pragma once

namespace quantfuse {

// Entry points of libgomp, which LLVM's and Intel's runtimes have under the same names.
struct OpenMp {
  int (*in_parallel)();
  int (*max_threads)();
  void (*parallel)(void (*body)(void*), void* data, unsigned num_threads, unsigned flags);
};

// The runtime, or null as long as none is loaded.
const OpenMp* openmp();

// Looks again if none was found yet: a program may load one after our first call.
void find_openmp();

}  // namespace quantfuse
