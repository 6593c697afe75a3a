// SPDX-License-Identifier: Apache-2.0
//
// Vectors of AVX-512 with the dot product of BF16 pairs. A type of its own: what is compiled for it must not
// be linked into a kernel for a CPU without the instruction.
#pragma once

#include "cpu/simd_avx512.h"

namespace quantfuse {

struct Avx512Bf16 : Avx512 {
  // acc[lane] += w * x of the low, then of the high 16 bits of the lane. Subnormal numbers are taken as zero.
  QF_SIMD F dot2(F acc, I w, I x) { return _mm512_dpbf16_ps(acc, (__m512bh)w, (__m512bh)x); }
};

}  // namespace quantfuse
