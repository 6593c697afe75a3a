// SPDX-License-Identifier: Apache-2.0
//
// Clusters of blocks (PTX ISA 7.8 and 8.1, sm_90): the two halves of their barrier, and stores into the
// shared memory of another block.
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ void cluster_arrive() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
// Orders no memory: for barriers just initialised (after their fence), and for staying until all are done.
__device__ __forceinline__ void cluster_arrive_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
  asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// What lies at `shared` in this block, in block `rank`.
__device__ __forceinline__ uint32_t address_in_block(uint32_t shared, uint32_t rank) {
  uint32_t remote;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(shared), "r"(rank));
  return remote;
}
// Arrives at a barrier of another block.
__device__ __forceinline__ void barrier_arrive_remote(uint32_t remote_barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(remote_barrier) : "memory");
}
// Waits at a barrier of this block at which others arrive.
__device__ __forceinline__ void barrier_wait_cluster(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(barrier),
      "r"(parity)
      : "memory");
}
// Stores into another block's shared memory and counts the bytes on a barrier there.
__device__ __forceinline__ void store_async(uint32_t remote, uint32_t bits, uint32_t remote_barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(remote),
               "r"(bits), "r"(remote_barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t remote, float value, uint32_t remote_barrier) {
  store_async(remote, __float_as_uint(value), remote_barrier);
}

// From this block's shared memory to the same or another address in that of block `rank`, whose barrier
// counts the bytes.
__device__ __forceinline__ void copy_to_block(uint32_t to, uint32_t from, uint32_t bytes, uint32_t barrier,
                                              uint32_t rank) {
  asm volatile(
      "{\n.reg .b32 remote_to, remote_barrier;\n"
      "mapa.shared::cluster.u32 remote_to, %0, %4;\n"
      "mapa.shared::cluster.u32 remote_barrier, %3, %4;\n"
      "cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [remote_to], [%1], %2, "
      "[remote_barrier];\n}" ::"r"(to),
      "r"(from), "r"(bytes), "r"(barrier), "r"(rank)
      : "memory");
}

}  // namespace quantfuse::ptx
