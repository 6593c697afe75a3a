// SPDX-License-Identifier: Apache-2.0
//
// INT8 or INT4 codes in either operand, any scales: see scaled_mm_int.h.
#include "cpu/simd_avx512.h"
#include "scaled_mm/scaled_mm_int.h"

namespace quantfuse::scaled_mm_int_avx512 {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) { return scaled_mm::accepts_int(p); }
size_t workspace_bytes(const Problem& p) { return scaled_mm::int_workspace_bytes<Avx512>(p); }
void launch(const Problem& p, const Launch& launch) { scaled_mm::launch_int<Avx512>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_int_avx512", Target::avx512, accepts, workspace_bytes,
                                      launch};

}  // namespace quantfuse::scaled_mm_int_avx512
