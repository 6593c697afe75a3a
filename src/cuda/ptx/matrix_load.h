// SPDX-License-Identifier: Apache-2.0
//
// What stmatrix stored transposed (cuda/ptx/matrix.h), back into the same registers (ldmatrix: PTX ISA 6.5).
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

// Four matrices: lane i says where column i % 8 of matrix i / 8 is.
__device__ __forceinline__ void load_matrices_transposed(uint32_t from, uint32_t (&m)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3])
               : "r"(from)
               : "memory");
}

}  // namespace quantfuse::ptx
