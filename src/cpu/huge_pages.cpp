// SPDX-License-Identifier: Apache-2.0
#include "cpu/huge_pages.h"

#include <cstdint>

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace quantfuse {

void use_huge_pages([[maybe_unused]] void* data, [[maybe_unused]] size_t bytes) {
#if defined(__linux__)
  constexpr uintptr_t kPage = uintptr_t{2} << 20;
  constexpr int kCollapse = 25;  // MADV_COLLAPSE, which headers older than Linux 6.1 do not name
  const auto begin = reinterpret_cast<uintptr_t>(data);
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage, last = (begin + bytes) / kPage * kPage;
  if (first >= last) return;
  void* const pages = reinterpret_cast<void*>(first);
  madvise(pages, last - first, MADV_HUGEPAGE);  // what has not been touched yet
  madvise(pages, last - first, kCollapse);      // and what has
#endif
}

}  // namespace quantfuse
