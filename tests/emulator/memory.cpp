// SPDX-License-Identifier: Apache-2.0
#include "memory.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

namespace emulator {
namespace {

struct Allocations {
  std::mutex mutex;
  std::map<uint64_t, size_t> sizes;  // by address
  size_t total = 0;
};
Allocations& allocations() {
  static Allocations all;
  return all;
}

}  // namespace

void* allocate(size_t bytes) {
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  const size_t rounded = (bytes + 511) / 512 * 512 + 512;
  void* memory = std::aligned_alloc(512, rounded);
  if (!memory) return nullptr;
  std::memset(memory, 0xcb, rounded);  // never zeros by chance
  all.sizes[reinterpret_cast<uint64_t>(memory)] = bytes;
  all.total += bytes;
  return memory;
}

bool release(void* memory) {
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  const auto it = all.sizes.find(reinterpret_cast<uint64_t>(memory));
  if (it == all.sizes.end()) return false;
  all.total -= it->second;
  all.sizes.erase(it);
  std::free(memory);
  return true;
}

Allocation find_allocation(uint64_t address, size_t bytes) {
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  auto it = all.sizes.upper_bound(address);
  if (it == all.sizes.begin()) return {};
  --it;
  const Allocation found = {it->first, it->first + it->second};
  return address + bytes <= found.end ? found : Allocation{};
}

size_t allocated_bytes() {
  auto& all = allocations();
  const std::lock_guard lock(all.mutex);
  return all.total;
}

}  // namespace emulator
