// SPDX-License-Identifier: Apache-2.0
#include "cpu/openmp.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace quantfuse {
namespace {

OpenMp runtime;
std::atomic<const OpenMp*> found{nullptr};

template <class Function>
bool look_up(const char* name, Function*& function) {
  function = reinterpret_cast<Function*>(dlsym(RTLD_DEFAULT, name));
  return function != nullptr;
}

// A library that leaves the process must not take the runtime with it.
void keep_loaded(const void* address) {
  Dl_info library;
  if (dladdr(address, &library) != 0) dlopen(library.dli_fname, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE);
}

}  // namespace

void find_openmp() {
  static std::mutex mutex;
  std::lock_guard lock(mutex);
  if (found.load(std::memory_order_relaxed)) return;
  if (look_up("omp_in_parallel", runtime.in_parallel) &&
      look_up("omp_get_max_threads", runtime.max_threads) && look_up("GOMP_parallel", runtime.parallel)) {
    keep_loaded(reinterpret_cast<const void*>(runtime.parallel));
    found.store(&runtime, std::memory_order_release);
  }
}

const OpenMp* openmp() {
  static const bool has_looked = (find_openmp(), true);
  (void)has_looked;
  return found.load(std::memory_order_acquire);
}

}  // namespace quantfuse
