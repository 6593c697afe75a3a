// SPDX-License-Identifier: Apache-2.0
//
// The memory of the emulated GPU: memory of the host, of which it is known what was allocated.
#pragma once

#include <cstddef>
#include <cstdint>

namespace emulator {

void* allocate(size_t bytes);
bool release(void* memory);  // whether it had been allocated

struct Allocation {
  uint64_t begin = 0, end = 0;
};
// That which holds all of these bytes; one that ends at 0 where there is none.
Allocation find_allocation(uint64_t address, size_t bytes);
inline bool is_allocated(uint64_t address, size_t bytes) { return find_allocation(address, bytes).end != 0; }
size_t allocated_bytes();

}  // namespace emulator
