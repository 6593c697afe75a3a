// SPDX-License-Identifier: Apache-2.0
//
// mma of bytes (PTX ISA 6.5, sm_75; 7.0, sm_80; FP8: 8.4, sm_89).
#pragma once

#include <cstdint>

namespace quantfuse::ptx {

// c[16, 8] += a[16, 32] b[32, 8]. Lane 4 g + q has of a columns 4 q .. 4 q + 3 of rows g and g + 8, then
// those 16 further on; of b the same of column g; of c columns 2 q, 2 q + 1 of row g, then of row g + 8. No
// side effect, so the compiler may interleave chains.
__device__ __forceinline__ void mma_m16n8k32_s8(int (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A quarter of it, c[8, 8] += a[8, 16] b[16, 8], which is all that sm_75 has: registers as above, but for the
// rows and columns that are not there.
__device__ __forceinline__ void mma_m8n8k16_s8(int& c0, int& c1, uint32_t a, uint32_t b) {
  asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0,%1}, {%2}, {%3}, {%0,%1};"
      : "+r"(c0), "+r"(c1)
      : "r"(a), "r"(b));
}

#if __CUDA_ARCH__ >= 890
__device__ __forceinline__ void mma_m16n8k32_e4m3(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                                  uint32_t b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

}  // namespace quantfuse::ptx
