// SPDX-License-Identifier: Apache-2.0
//
// Vectors of AVX2 with the dot product of bytes, as CPUs without AVX-512 have it (AVX-VNNI: Intel's since
// 2021, of laptops above all). A type of its own: what is compiled for it must not be linked into a kernel
// for a CPU without the instruction.
#pragma once

#include "cpu/simd_avx2.h"

namespace quantfuse {

struct AvxVnni : Avx2 {
  // acc[lane] += sum over the lane's 4 bytes of w (unsigned) * x (signed).
  QF_SIMD Sums dot4(Sums acc, I w_u8, I x_s8) { return (Sums)_mm256_dpbusd_avx_epi32((I)acc, w_u8, x_s8); }
  QF_SIMD I dot4(I acc, I w_u8, I x_s8) { return ints(dot4(sums(acc), w_u8, x_s8)); }
};

}  // namespace quantfuse
