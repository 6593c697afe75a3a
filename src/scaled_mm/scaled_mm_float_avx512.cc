// SPDX-License-Identifier: Apache-2.0
//
// FP8 codes, by conversion to float32: see scaled_mm_float.h.
#include "cpu/simd_avx512.h"
#include "scaled_mm/scaled_mm_float.h"

namespace quantfuse::scaled_mm_float_avx512 {
using scaled_mm::Problem;
namespace {

Verdict accepts(const Problem& p) { return scaled_mm::accepts_float(p); }
size_t workspace_bytes(const Problem& p) { return scaled_mm::float_workspace_bytes<Avx512>(p); }
void launch(const Problem& p, const Launch& launch) { scaled_mm::launch_float<Avx512>(p, launch); }

}  // namespace

extern const Kernel<Problem> entry = {"scaled_mm_float_avx512", Target::avx512, accepts, workspace_bytes,
                                      launch};

}  // namespace quantfuse::scaled_mm_float_avx512
