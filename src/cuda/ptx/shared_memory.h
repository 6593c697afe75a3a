// SPDX-License-Identifier: Apache-2.0
//
// Shared memory by 32-bit addresses, copies of 16 bytes into it, and the numbered barriers of a block's
// warps.
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// ---- Loads and stores ----

__device__ __forceinline__ uint4 load_shared16(uint32_t from) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}
__device__ __forceinline__ float2 load_shared_float2(uint32_t from) {
  float2 v;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared4(uint32_t from) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ float load_shared_float(uint32_t from) {
  float v;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared2(uint32_t from) {
  uint16_t v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ int load_shared_s8(uint32_t from) {
  int v;
  asm volatile("ld.shared.s8 %0, [%1];" : "=r"(v) : "r"(from) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared2(uint32_t to, uint16_t v) {
  asm volatile("st.shared.u16 [%0], %1;" ::"r"(to), "h"(v) : "memory");
}
__device__ __forceinline__ void store_shared4(uint32_t to, uint32_t v) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void store_shared16(uint32_t to, uint4 v) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}
__device__ __forceinline__ void store_shared_float(uint32_t to, float v) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(v) : "memory");
}
__device__ __forceinline__ void store_shared_float2(uint32_t to, float2 v) {
  asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(v.x), "f"(v.y) : "memory");
}
// The compiler forgets what it knows of a value, and so cannot compute in advance what depends on it.
__device__ __forceinline__ void hide(int& value) { asm volatile("" : "+r"(value)); }

// ---- Copies (cp.async, PTX ISA 7.0, sm_80) ----

// 16 bytes through L2 alone: of `from` the first `bytes`, then zeros.
__device__ __forceinline__ void copy16_async(uint32_t to, const void* from, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy16_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy4_async(uint32_t to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
// Until all that this thread has begun to copy is there.
__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }
// Copies begun since the last of these are one group.
__device__ __forceinline__ void end_copy_group() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Until all of this thread's groups but the last kPending are there.
template <int kPending>
__device__ __forceinline__ void wait_copy_groups() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- Numbered barriers; `threads` of those that wait and those that only arrive ----

template <int kBarrier, int kThreads>
__device__ __forceinline__ void named_barrier_sync() {
  asm volatile("bar.sync %0, %1;" ::"n"(kBarrier), "n"(kThreads) : "memory");
}
__device__ __forceinline__ void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace quantfuse::ptx
