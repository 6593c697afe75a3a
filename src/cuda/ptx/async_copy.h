// SPDX-License-Identifier: Apache-2.0
//
// Copies into shared memory by the copy engine, and the barriers that count their bytes (PTX ISA 8.0, sm_90).
// Shared memory by 32-bit addresses.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/ptx/shared_memory.h"

namespace quantfuse::ptx {

// ---- Barriers ----

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine and to the other blocks of the cluster.
__device__ __forceinline__ void barrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Arrives once all that this thread has begun to copy with cp.async is there.
__device__ __forceinline__ void arrive_after_copies(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}
// Arrives, and adds bytes that are to come.
__device__ __forceinline__ void barrier_expect(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}

// ---- Copies ----

__device__ __forceinline__ uint64_t evict_first_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ uint64_t evict_normal_policy() {
  uint64_t policy;
  asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// A run of bytes: a multiple of 16, and so are the addresses.
__device__ __forceinline__ void bulk_copy(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier,
                                          uint64_t policy) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
      "[%3], "
      "%4;" ::"r"(to),
      "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
      : "memory");
}
// The box of a matrix whose first column and row these are, as its map says; zeros beyond its edges.
__device__ __forceinline__ void box_copy(uint32_t to, const CUtensorMap& map, int column, int row,
                                         uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, "
      "%3}], "
      "[%4];" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier)
      : "memory");
}

// The same of three dimensions.
__device__ __forceinline__ void box_copy(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4}], [%5], %6;" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(barrier), "l"(policy)
      : "memory");
}

// Of four dimensions.
__device__ __forceinline__ void box_copy(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2, int c3,
                                         uint32_t barrier, uint64_t policy) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], "
      "[%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "l"(policy)
      : "memory");
}
// Into the same place in both blocks of a cluster of two, on the barrier of each.
__device__ __forceinline__ void box_copy_to_pair(uint32_t to, const CUtensorMap& map, int c0, int c1, int c2,
                                                 int c3, uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
      "l"(&map), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// The same of two dimensions.
__device__ __forceinline__ void box_copy_to_pair(uint32_t to, const CUtensorMap& map, int column, int row,
                                                 uint32_t barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(barrier), "h"(static_cast<uint16_t>(3))
      : "memory");
}
// From shared memory to the box whose first column and row these are; what is beyond the edges is left out.
__device__ __forceinline__ void store_box(const CUtensorMap& map, int column, int row, uint32_t from) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&map),
               "r"(column), "r"(row), "r"(from)
               : "memory");
}
__device__ __forceinline__ void end_store_group() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until what this thread's stores read may be written again; until they are done.
__device__ __forceinline__ void wait_stores_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
__device__ __forceinline__ void wait_stores() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

__device__ __forceinline__ void prefetch_map(const CUtensorMap& map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}
// Ordinary stores to shared memory before, copies that read it after.
__device__ __forceinline__ void copy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
// The same for global memory, also of what other blocks have stored.
__device__ __forceinline__ void global_copy_fence() {
  asm volatile("fence.proxy.async.global;" ::: "memory");
}

}  // namespace quantfuse::ptx
