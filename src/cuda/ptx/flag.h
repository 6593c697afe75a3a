// SPDX-License-Identifier: Apache-2.0
//
// A number in global memory by which one block tells another that what it wrote is there (PTX ISA 6.0,
// sm_70).
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

// What this thread has written before, or knows by a barrier that others have, is there when it is seen.
__device__ __forceinline__ void store_release(uint64_t* flag, uint64_t value) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}
__device__ __forceinline__ uint64_t load_acquire(const uint64_t* flag) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
}

}  // namespace quantfuse::ptx
