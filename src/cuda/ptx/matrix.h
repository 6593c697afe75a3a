// SPDX-License-Identifier: Apache-2.0
//
// 8 x 8 matrices of 16-bit numbers to shared memory (stmatrix: PTX ISA 7.8, sm_90), and pairs of such
// numbers. Lane 4 g + q has columns 2 q, 2 q + 1 of row g.
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

// Four matrices, each row to 16 bytes of shared memory: lane i says where row i % 8 of matrix i / 8 goes.
__device__ __forceinline__ void store_matrices(uint32_t to, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// The same of the transposed matrices: lane i says where column i % 8 of matrix i / 8 goes.
__device__ __forceinline__ void store_matrices_transposed(uint32_t to, const uint32_t (&m)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(m[0]),
               "r"(m[1]), "r"(m[2]), "r"(m[3])
               : "memory");
}

// Two numbers, rounded to BF16 or FP16, in a word.
__device__ __forceinline__ uint32_t pack_two(float low, float high, bool is_bf16) {
  uint32_t bf16_word, f16_word;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bf16_word) : "f"(high), "f"(low));
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(f16_word) : "f"(high), "f"(low));
  return is_bf16 ? bf16_word : f16_word;
}
__device__ __forceinline__ float2 unpack_two(uint32_t word, bool is_bf16) {
  if (is_bf16) return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
  float2 two;
  asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.f32.f16 %0, low;\ncvt.f32.f16 %1, high;\n}"
      : "=f"(two.x), "=f"(two.y)
      : "r"(word));
  return two;
}

}  // namespace quantfuse::ptx
