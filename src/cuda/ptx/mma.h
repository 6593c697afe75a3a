// SPDX-License-Identifier: Apache-2.0
//
// mma of 16-bit floats (PTX ISA 7.0, sm_80), and the loads that bring its operands (PTX ISA 6.5, sm_75).
#pragma once

#include <cstdint>
#include <type_traits>

#include "formats/numbers.h"

namespace quantfuse::ptx {

// c[16, 8] += a[16, 16] b[16, 8]. Lane 4 g + q has of a columns 2 q, 2 q + 1 of rows g and g + 8, then those
// 8 further on; of b the same of column g; of c columns 2 q, 2 q + 1 of row g, then of row g + 8. No side
// effect, so the compiler may interleave chains.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                             uint32_t b1) {
  if constexpr (std::is_same_v<T, bf16>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// Four matrices of 8 rows of 16 bytes; lane 8 i + r says where row r of matrix i is, lane 4 g + q gets word q
// of row g of each.
__device__ __forceinline__ uint4 load_matrices(uint32_t from) {
  uint4 v;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(from)
               : "memory");
  return v;
}

}  // namespace quantfuse::ptx
