// SPDX-License-Identifier: Apache-2.0
//
// mma of 16-bit floats, and the loads that bring its operands (PTX ISA 6.5, sm_75; 7.0, sm_80).
//
// d[16, 8] = a[16, 16] b[16, 8] + c[16, 8]. Lane 4 g + q has of a the columns 2 q, 2 q + 1 of rows g and
// g + 8 (registers 0 and 1), then those 8 further on (2 and 3); of b the same rows of column g; of c and d
// columns 2 q, 2 q + 1 of row g, then of row g + 8. No side effects, so the compiler may interleave chains.
#pragma once

#include <cstdint>

#include "formats/numbers.h"

namespace quantfuse::ptx {

template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1,
                                             const float (&c)[4]) {
  if constexpr (__is_same(T, bf16)) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%10,%11,%12,%13};"
        : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(c[0]), "f"(c[1]), "f"(c[2]),
          "f"(c[3]));
  }
}

// Half of it in k, which is all that sm_75 has, and only for f16.
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t b,
                                            const float (&c)[4]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%8,%9,%10};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a0), "r"(a1), "r"(b), "f"(c[0]), "f"(c[1]), "f"(c[2]), "f"(c[3]));
}

// Four 8 x 8 matrices: lane l gives the shared address of row l % 8 of matrix l / 8, 16 bytes, and of each
// gets columns 2 q, 2 q + 1 of row g.
__device__ __forceinline__ void load_matrices(uint32_t (&v)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(row)
               : "memory");
}

}  // namespace quantfuse::ptx
