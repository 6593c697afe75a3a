// SPDX-License-Identifier: Apache-2.0
//
// lop3: any function of three words, by its truth table (PTX ISA 4.3).
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

// (word ^ flip) & mask. Written as such, with constants, the compiler makes two instructions of it.
__device__ __forceinline__ uint32_t flip_and_mask(uint32_t word, uint32_t flip, uint32_t mask) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0x28;" : "=r"(out) : "r"(word), "r"(flip), "r"(mask));
  return out;
}

// (word & mask) | more.
__device__ __forceinline__ uint32_t mask_and_join(uint32_t word, uint32_t mask, uint32_t more) {
  uint32_t out;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(out) : "r"(word), "r"(mask), "r"(more));
  return out;
}

}  // namespace quantfuse::ptx
